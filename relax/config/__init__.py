"""The one configuration tree: frozen, strict, read from TOML and flags, every field documented.

A section is named after the stage that reads it. Field names are unique over the tree, so that
`--field-name` is a flag and `[section] field_name` a TOML key for the same thing. Fields marked
`keyed=False` (paths, placement, display) never enter the key of an artifact.
"""

from __future__ import annotations

from pydantic import model_validator

from relax.config.fields import Placement, Section
from relax.config.placement import PlacementSection, SlurmSection
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
    def _sampling_fits(self) -> Config:
        """Settings of sampling that need each other."""
        r, reward = self.rollout, self.reward
        if (r.rollout_engine == "external") != bool(r.rollout_external_engine_addrs):
            raise ValueError(
                f"rollout_engine = {r.rollout_engine!r} with rollout_external_engine_addrs = "
                f"{list(r.rollout_external_engine_addrs)}: 'external' and addresses go together"
            )
        if r.over_sampling_batch_size and not r.dynamic_sampling_filter_path:
            raise ValueError(
                f"over_sampling_batch_size = {r.over_sampling_batch_size} without "
                "dynamic_sampling_filter_path: nothing would be left out"
            )
        if reward.overlong_buffer_len > r.rollout_max_response_len:
            raise ValueError(
                f"overlong_buffer_len = {reward.overlong_buffer_len} is more than "
                f"rollout_max_response_len = {r.rollout_max_response_len}"
            )
        if r.rollout_min_tokens > r.rollout_max_response_len:
            raise ValueError(
                f"rollout_min_tokens = {r.rollout_min_tokens} is more than "
                f"rollout_max_response_len = {r.rollout_max_response_len}"
            )
        return self

    @model_validator(mode="after")
    def _batches_fit(self) -> Config:
        """Rollout, group and optimizer step divide each other."""
        total, size = self.responses_per_rollout, self.update.global_batch_size
        steps, group = self.optimizer_steps, self.rollout.n_samples_per_prompt
        made_of = f"rollout_batch_size * n_samples_per_prompt = {total}"
        if size is not None and steps * size != total:
            raise ValueError(
                f"{made_of} is not num_steps_per_rollout * global_batch_size = {steps} * {size}"
            )
        if total % steps:
            raise ValueError(f"{made_of} is not a multiple of num_steps_per_rollout = {steps}")
        if (total // steps) % group:
            raise ValueError(
                f"global_batch_size = {total // steps} is not a multiple of "
                f"n_samples_per_prompt = {group}: an optimizer step takes whole groups"
            )
        return self


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


def section_of() -> dict[str, str]:
    """Field name -> the section that owns it."""
    return {field: name for name, cls in sections().items() for field in cls.model_fields}
