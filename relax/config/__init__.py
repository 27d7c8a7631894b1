"""The one configuration tree: frozen, strict, read from TOML and flags, every field documented.

A section is named after the stage that reads it. Field names are unique over the tree, so that
`--field-name` is a flag and `[section] field_name` a TOML key for the same thing. Fields marked
`keyed=False` (paths, placement, display) never enter the key of an artifact.
"""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import ValidationInfo, model_validator

from relax.config.fields import Fault, Placement, Section, told
from relax.config.placement import Allocation, PlacementSection, SlurmSection
from relax.config.run import (
    DataSection,
    EvaluateSection,
    ModelSection,
    RunSection,
    SeedSection,
    SftSection,
    WandbSection,
)
from relax.config.sampling import RewardSection, RolloutSection
from relax.config.training import AlgorithmSection, UpdateSection

__all__ = [
    "AlgorithmSection",
    "Allocation",
    "Config",
    "DataSection",
    "EvaluateSection",
    "ModelSection",
    "Placement",
    "PlacementSection",
    "RewardSection",
    "RolloutSection",
    "RunSection",
    "Section",
    "SeedSection",
    "SftSection",
    "SlurmSection",
    "UpdateSection",
    "WandbSection",
    "flag_of",
    "section_of",
    "sections",
    "value_of",
]


class Config(Section):
    """A whole run's settings."""

    run: RunSection = RunSection()
    seeds: SeedSection = SeedSection()
    model: ModelSection = ModelSection()
    data: DataSection = DataSection()
    rollout: RolloutSection = RolloutSection()
    reward: RewardSection = RewardSection()
    algorithm: AlgorithmSection = AlgorithmSection()
    update: UpdateSection = UpdateSection()
    evaluate: EvaluateSection = EvaluateSection()
    sft: SftSection = SftSection()
    placement: PlacementSection = PlacementSection()
    slurm: SlurmSection = SlurmSection()
    wandb: WandbSection = WandbSection()

    @property
    def responses_per_rollout(self) -> int:
        """Responses of one rollout."""
        return self.rollout.rollout_batch_size * self.rollout.n_samples_per_prompt

    def longest_sequence(self, context_len: int = 0) -> int:
        """Tokens of the longest prompt with the longest response of a rollout.

        Several turns share the room of one response. context_len: the model's own limit; 0: none.
        """
        longest = self.data.rollout_max_prompt_len + self.rollout.rollout_max_response_len
        limits = (longest, self.rollout.rollout_max_context_len, context_len)
        return min(limit for limit in limits if limit)

    @property
    def optimizer_steps(self) -> int:
        """Optimizer steps per rollout."""
        if self.update.num_steps_per_rollout is not None:
            return self.update.num_steps_per_rollout
        return self.responses_per_rollout // (
            self.update.global_batch_size or self.responses_per_rollout
        )

    def reference_version(self, step: int) -> int:
        """The policy that is the reference at `step`; 0: the model of ref_load."""
        interval = self.algorithm.ref_update_interval
        return step // interval * interval if interval else 0

    def placement_of(self, stage: str) -> Placement:
        """Where `stage` runs."""
        own: Placement | None = getattr(self.placement, f"{_family(stage)}_placement")
        return own or self.placement.placement

    def allocation_of(self, stage: str) -> str:
        """Name of the allocation that `stage` runs in; empty where it has a job of its own."""
        return getattr(self.slurm, f"{_family(stage)}_allocation")

    @model_validator(mode="after")
    def _fits(self, info: ValidationInfo) -> Config:
        """Settings that need each other; all that do not fit are told at once."""
        told(info, [*self._sampling_faults(), *self._batch_faults()])
        return self

    def _sampling_faults(self) -> Iterator[Fault]:
        r, buffer = self.rollout, self.reward.overlong_buffer_len
        longest = f"rollout_max_response_len = {r.rollout_max_response_len}"
        if (r.rollout_engine == "external") != bool(r.rollout_external_engine_addrs):
            yield (
                ("rollout_engine", "rollout_external_engine_addrs"),
                f"rollout_engine = {r.rollout_engine!r} with rollout_external_engine_addrs = "
                f"{list(r.rollout_external_engine_addrs)}: 'external' and addresses go together",
            )
        if r.over_sampling_batch_size and not r.dynamic_sampling_filter_path:
            yield (
                ("over_sampling_batch_size", "dynamic_sampling_filter_path"),
                f"over_sampling_batch_size = {r.over_sampling_batch_size} without "
                "dynamic_sampling_filter_path: nothing would be left out",
            )
        if buffer > r.rollout_max_response_len:
            yield (
                ("overlong_buffer_len", "rollout_max_response_len"),
                f"overlong_buffer_len = {buffer} is more than {longest}",
            )
        if r.rollout_min_tokens > r.rollout_max_response_len:
            yield (
                ("rollout_min_tokens", "rollout_max_response_len"),
                f"rollout_min_tokens = {r.rollout_min_tokens} is more than {longest}",
            )

    def _batch_faults(self) -> Iterator[Fault]:
        """Rollout, group and optimizer step divide each other; the first that does not."""
        total, size = self.responses_per_rollout, self.update.global_batch_size
        steps, group = self.optimizer_steps, self.rollout.n_samples_per_prompt
        made_of = f"rollout_batch_size * n_samples_per_prompt = {total}"
        if size is not None and steps * size != total:
            line = f"{made_of} is not num_steps_per_rollout * global_batch_size = {steps} * {size}"
        elif total % steps:
            line = f"{made_of} is not a multiple of num_steps_per_rollout = {steps}"
        elif (total // steps) % group:
            line = (
                f"global_batch_size = {total // steps} is not a multiple of "
                f"n_samples_per_prompt = {group}: an optimizer step takes whole groups"
            )
        else:
            return
        yield BATCHES, line


BATCHES = (
    "rollout_batch_size",
    "n_samples_per_prompt",
    "num_steps_per_rollout",
    "global_batch_size",
)


def _family(stage: str) -> str:
    """The stage whose placement `stage` shares; rollout.2 is a round of rollout."""
    stage = stage.partition(".")[0]
    return {"evaluate": "rollout", "sft": "update", "score": "update"}.get(stage, stage)


def flag_of(field: str) -> str:
    """`lr_warmup_iters` -> `--lr-warmup-iters`."""
    return "--" + field.replace("_", "-")


def sections() -> dict[str, type[Section]]:
    """Section name -> its class, in the order of the tree."""
    return {name: type(f.default) for name, f in Config.model_fields.items()}


def value_of(config: Config, name: str):
    """The value of a setting, whichever section holds it."""
    return getattr(getattr(config, section_of()[name]), name)


def section_of() -> dict[str, str]:
    """Field name -> the section that owns it."""
    return {field: name for name, cls in sections().items() for field in cls.model_fields}
