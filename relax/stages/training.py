"""What the training stages share: the learners at a step, redo after a crash, and publishing."""

from __future__ import annotations

import sys
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Literal

from relax.algorithms import rules
from relax.config import Config, UpdateSection
from relax.errors import ArtifactError
from relax.stages.models import given_model
from relax.stages.perform import Inputs, Warm
from relax.store import Output, Run, disk, rows
from relax.store.commit import CHECKPOINTS, POLICIES
from relax.trainer import checkpoint
from relax.trainer.actor import Actor
from relax.trainer.critic import Critic
from relax.trainer.device import device_type, free_memory
from relax.trainer.learner import Learner
from relax.trainer.options import Dtype, TrainerOptions
from relax.trainer.publish import policy_hash
from relax.trainer.ranks import barrier, ensure_group, from_first, num_ranks

Metrics = list[dict[str, float]]

OF_SETTINGS = {f.name for f in fields(TrainerOptions)} & UpdateSection.model_fields.keys()
"""The trainer's knobs that are settings as they stand."""
LAYOUT = (
    "micro_batch_size",
    "max_tokens_per_gpu",
    "num_replicas",
    "recompute_every",
    "offload",
)
"""Those that lay out an update's work: a run may change them, and they move last bits."""


@dataclass(frozen=True)
class Learners:
    """All that an update changes: the actor, and the critic where the algorithm has one."""

    actor: Actor
    critic: Critic | None
    drift: str = ""
    """Where a redo gave another policy than was published, and `accept_drift` let it pass."""

    @property
    def parts(self) -> Mapping[str, Learner]:
        """Those that there are, by the name of their directory in a checkpoint."""
        parts: dict[str, Learner] = {"actor": self.actor}
        return parts if self.critic is None else {**parts, "critic": self.critic}

    def begin_save(self, directory: Path, *, in_background: bool) -> Callable[[], str]:
        """Write a checkpoint, one directory for each of them, so that they stay in step.

        What it returns finishes that, and gives the hash of the whole.
        """
        finish = {
            name: learner.begin_save(directory / name, in_background=in_background)
            for name, learner in self.parts.items()
        }
        return lambda: checkpoint.combined_hash({name: end() for name, end in finish.items()})

    def restore(self, directory: Path) -> None:
        """Continue from a checkpoint."""
        for name, learner in self.parts.items():
            learner.restore(directory / name)


STEP_TAKEN = {"actor": ("train/lr", "sft/lr"), "critic": ("train/critic-lr",)}
"""Metrics that an optimizer step reports where it was taken."""

Train = Callable[[Learners, int], Metrics]
"""Take the learners through one step of the run; one mapping of metrics per optimizer step."""


def train_and_publish(
    inputs: Inputs, output: Output, warm: Warm, *, options: TrainerOptions, train: Train
) -> Metrics:
    """Bring the learners to this step, train them, and publish policy and checkpoint."""
    run, step = inputs.run, inputs.step
    learners = learners_before(run, step, warm, options, train)
    warm.learners_at = ""  # whole again only when this step is committed
    note_drift(learners, output)
    output.notes["layout"] = {name: getattr(options, name) for name in LAYOUT}
    metrics = train(learners, step)

    def write_policy(directory: Path) -> str:
        return learners.actor.publish(directory, options.sampling_dtype)

    def publish_policy() -> None:
        output.publish(POLICIES, step + 1, write_policy)

    def write_both(directory: Path) -> str:
        finish = learners.begin_save(directory, in_background=run.config.run.async_save)
        publish_policy()
        return finish()

    if checkpoint_due(run.config, step, output.stage):
        output.publish(CHECKPOINTS, step + 1, write_both)
    else:
        publish_policy()
    if learners.critic is not None:
        output.notes["critic"] = learners.critic.weights_hash()
    return metrics


def note_drift(learners: Learners, output: Output) -> None:
    """What is made by learners that drifted says so in its manifest."""
    if learners.drift:
        output.notes["drift"] = learners.drift


def trainer_options(config: Config, *, temperature: float) -> TrainerOptions:
    """The trainer's knobs out of the configuration."""
    settings = config.update
    return TrainerOptions(
        temperature=temperature,
        dtype=_dtype(settings.update_dtype),
        sampling_dtype=_dtype(settings.rollout_dtype),
        **{name: getattr(settings, name) for name in OF_SETTINGS},
    )


def _dtype(setting: Dtype | Literal["auto"]) -> Dtype:
    """The setting, or what suits this machine."""
    if setting != "auto":
        return setting
    return "bfloat16" if device_type() == "cuda" else "float32"


def rebuild_policy(run: Run, version: int, directory: Path) -> None:
    """Write policy `version` again from the checkpoint of that version.

    Raises ArtifactError when there is none, or it gives another policy than was published.
    """
    options = trainer_options(run.config, temperature=run.config.rollout.rollout_temperature)
    saved, path = newest_checkpoint(run, version)
    if saved != version:
        raise ArtifactError(f"{run.root}: no whole checkpoint of policy {version} to rebuild from")
    learners = _learners(run, options, path)
    if drift := _drift(learners, run, version):
        raise ArtifactError(f"{path}: holds another policy {version} than was published{drift}")
    learners.actor.publish(directory, options.sampling_dtype)


def inspection_dir(run: Run, step: int) -> Path:
    """Where the batch is left that ends a run at `step`: several non-finite steps in a row."""
    return run.root / "inspect" / f"{step:06d}"


def checkpoint_due(config: Config, step: int, stage: str) -> bool:
    """Every save_interval steps and at the end; every step where nothing stays warm."""
    if config.placement_of(stage) == "job" or step == config.run.num_rollout - 1:
        return True
    interval = config.run.save_interval
    return interval > 0 and (step + 1) % interval == 0


def learners_before(
    run: Run, step: int, warm: Warm, options: TrainerOptions, train: Train
) -> Learners:
    """The learners as step - 1 left them: warm, or from the newest checkpoint.

    Steps since that checkpoint are redone, each in the layout it was made in. They are left in
    `warm` for the stages that follow.
    """
    published = run.published(step)
    wanted = published.identity if published else f"start:{run.policy_hash(0)}"
    if warm.learners is None or warm.learners_at != wanted:
        warm.learners, warm.learners_at = None, ""
        version, path = newest_checkpoint(run, step)
        if version < run.first_step:
            raise ArtifactError(
                f"{run.root}: no whole checkpoint of policy {run.first_step}, where it was forked; "
                "fork it again"
            )
        layouts = [*(_as_made(run, made, options) for made in range(version, step)), options]
        learners = _learners(run, layouts[0], path)
        for redone, then in enumerate(layouts[1:], start=version):
            train(learners, redone)
            learners = _checked_redo(learners, run, redone + 1)
            if then != learners.actor.options:
                put_down = _put_down(learners, run, step + 1)
                drift = learners.drift
                del learners  # before the next ones take their memory
                free_memory()
                learners = replace(_learners(run, then, put_down), drift=drift)
                barrier()  # all ranks have read it
                disk.remove_tree(put_down)
        warm.learners, warm.learners_at = learners, wanted
    return warm.learners


def _as_made(run: Run, step: int, options: TrainerOptions) -> TrainerOptions:
    """The options with the layout that the update of `step` was made in."""
    manifest = run.published(step + 1)
    assert manifest is not None
    layout = dict(manifest.notes.get("layout", {}))
    if num_ranks() % layout.get("num_replicas", 1):
        del layout["num_replicas"]  # made by another number of ranks; the redo is checked anyway
    return replace(options, **layout)


def _put_down(learners: Learners, run: Run, version: int) -> Path:
    """A checkpoint that no manifest names, to go on from in another layout.

    It is named for the version that is being made: what a killed attempt leaves is swept with it.
    """
    name = from_first(f".staging-{version:06d}.put-down-{uuid.uuid4().hex}")
    directory = run.root / CHECKPOINTS / name
    disk.make_dir(directory)
    learners.begin_save(directory, in_background=False)()
    return directory


def _learners(run: Run, options: TrainerOptions, path: Path | None) -> Learners:
    """The learners that a checkpoint holds; None: those that the run starts with."""
    settings, length = run.config.model, run.schedule_steps
    use = "train" if path is None else "restore"
    idle = run.config.algorithm.num_critic_only_steps * run.config.optimizer_steps
    actor = Actor.load(
        given_model(run, "model"), options, num_schedule_steps=max(1, length - idle), use=use
    )
    critic = None
    if "critic" in parts_of(run.config):
        rate = run.config.update.critic_lr or run.config.update.lr
        start = given_model(run, "critic_load" if settings.critic_load else "model")
        critic = Critic.load(start, replace(options, lr=rate), num_schedule_steps=length, use=use)
    learners = Learners(actor, critic)
    if path is not None:
        learners.restore(path)
    return learners


def parts_of(config: Config) -> tuple[str, ...]:
    """Names of the learners that the algorithm has, and of their directories in a checkpoint."""
    return ("actor", "critic") if "critic" in rules.row_of(config).needs else ("actor",)


def newest_checkpoint(run: Run, step: int) -> tuple[int, Path | None]:
    """The newest undamaged checkpoint up to `step`: policy version and directory; 0 and None."""
    ensure_group()  # the ranks share the reading
    for version, path, published in run.checkpoints(step):
        names = _parts_saved(run, version)
        fault = _find_fault(path, names, published.hash)
        if not fault:
            _check_parts(run, path, names)
            return version, path
        _check_in_step(names, run, version, path)
        print(f"{path}: damaged: {fault}; going back to the one before it", file=sys.stderr)
    return 0, None


def _parts_saved(run: Run, version: int) -> tuple[str, ...]:
    """Names of the parts of a checkpoint; a fork's own algorithm may have others."""
    manifest = run.published(version)
    return ("actor", "critic") if manifest and "critic" in manifest.notes else ("actor",)


def _check_parts(run: Run, path: Path, names: Iterable[str]) -> None:
    """A fork may have another algorithm; one with a critic needs one to go on from."""
    if missing := sorted(set(parts_of(run.config)) - set(names)):
        raise ArtifactError(
            f"{path}: holds no {missing[0]}, and {run.config.algorithm.advantage_estimator} needs "
            "one; go on with an algorithm without, or start another run from its policy"
        )


def _find_fault(directory: Path, names: Iterable[str], saved: str) -> str:
    """What is wrong with a checkpoint of the hash `saved`, or ""."""
    for name in names:
        if fault := checkpoint.find_fault(directory / name):
            return f"{name}/{fault}"
    parts = {name: checkpoint.content_hash(directory / name) for name in names}
    same = checkpoint.combined_hash(parts) == saved
    return "" if same else "its parts are not of the save that its manifest names"


def _check_in_step(names: Iterable[str], run: Run, version: int, path: Path) -> None:
    """ArtifactError for a checkpoint that is not what was published because its parts are mixed.

    Each part is whole, but they do not stand where the updates before `version` left them.
    """
    found = {name: checkpoint.steps_done(path / name) for name in names}
    expected = steps_behind(run, version)
    if None in found.values() or all(found[name] == expected[name] for name in found):
        return
    raise ArtifactError(
        f"{path}: {_told(found)}; the {version} updates before it left {_told(expected)}: "
        "its parts are not of one checkpoint; put the right ones back, or remove it to go on from "
        "the one before"
    )


def steps_behind(run: Run, version: int) -> dict[str, int]:
    """Optimizer steps that the updates before `version` took of each learner.

    A learning rate is reported for each step that was taken: not for skipped ones, nor for the
    actor's in rollouts that train the critic alone.
    """
    stages = [manifest.stage for step in range(version) if (manifest := run.published(step + 1))]
    tables = [rows(run.table(step, stage, "metrics")) for step, stage in enumerate(stages)]
    return {
        name: sum(table.metric.count(metric) for table in tables for metric in metrics)
        for name, metrics in STEP_TAKEN.items()
    }


def _told(steps: Mapping[str, int | None]) -> str:
    return ", ".join(f"{name} at optimizer step {step}" for name, step in steps.items())


def _drift(learners: Learners, run: Run, version: int) -> str:
    """Where the learners differ from what was published as `version`; "" where they do not."""
    actor, critic = learners.actor, learners.critic
    manifest = run.published(version)
    assert manifest is not None
    if actor.weights_hash() != run.policy_hash(version):
        return _first_difference(actor, run, version) or " (whose files are gone)"
    if critic is not None and critic.weights_hash() != manifest.notes.get("critic"):
        return ": the critic differs"
    return ""


def _checked_redo(learners: Learners, run: Run, version: int) -> Learners:
    """A redone step must give the policy that was published.

    ArtifactError where it does not, unless the settings accept the drift, which is told and noted.
    """
    difference = _drift(learners, run, version)
    if not difference:
        return learners
    drift = f"redoing update {version - 1} gave another policy {version} than was published"
    if run.config.run.accept_drift:
        print(f"{run.root}: {drift}{difference}; accepted", file=sys.stderr)
        return replace(learners, drift=drift + difference)
    raise ArtifactError(
        f"{run.root}: {drift}{difference}; continue on the kind of machine, with the ranks and the "
        "library versions of the first run; or give --accept-drift to go on from what the redo "
        "gave; or `relax fork` at a checkpoint"
    )


def _first_difference(actor: Actor, run: Run, version: int) -> str:
    """Name the first tensor that differs, if the published policy is still there."""
    try:
        directory = run.policy_dir(version)
    except ArtifactError:
        return ""
    if policy_hash(directory) != run.policy_hash(version):
        return " (and its files are damaged)"
    return actor.first_difference(directory)
