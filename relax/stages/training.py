"""What the training stages share: the learners at a step, redo after a crash, and publishing."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from relax.algorithms import rules
from relax.config import Config
from relax.errors import ArtifactError
from relax.stages.models import given_model
from relax.stages.perform import Inputs, Warm
from relax.store import Output, Run, rows
from relax.store.commit import CHECKPOINTS, POLICIES
from relax.trainer import checkpoint
from relax.trainer.actor import Actor, TrainerOptions, policy_hash
from relax.trainer.critic import Critic
from relax.trainer.device import device_type
from relax.trainer.learner import Learner
from relax.trainer.options import Dtype

Metrics = list[dict[str, float]]


@dataclass(frozen=True)
class Learners:
    """All that an update changes: the actor, and the critic where the algorithm has one."""

    actor: Actor
    critic: Critic | None

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

    def find_fault(self, directory: Path, saved: str) -> str:
        """What is wrong with a checkpoint of the hash `saved`, or ""."""
        for name in self.parts:
            if fault := checkpoint.find_fault(directory / name):
                return f"{name}/{fault}"
        parts = {name: checkpoint.content_hash(directory / name) for name in self.parts}
        same = checkpoint.combined_hash(parts) == saved
        return "" if same else "its parts are not of the save that its manifest names"

    def restore(self, directory: Path) -> None:
        """Continue from a checkpoint."""
        for name, learner in self.parts.items():
            learner.restore(directory / name)


STEP_TAKEN = {"actor": "train/lr", "critic": "train/critic-lr"}

Train = Callable[[Learners, int], Metrics]
"""Take the learners through one step of the run; one mapping of metrics per optimizer step."""


def train_and_publish(
    inputs: Inputs, output: Output, warm: Warm, *, options: TrainerOptions, train: Train
) -> Metrics:
    """Bring the learners to this step, train them, and publish policy and checkpoint."""
    run, step = inputs.run, inputs.step
    learners = learners_before(run, step, warm, options, train)
    warm.learners_at = ""  # whole again only when this step is committed
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


def trainer_options(config: Config, *, temperature: float) -> TrainerOptions:
    """The trainer's knobs out of the configuration."""
    u = config.update
    return TrainerOptions(
        lr=u.lr,
        min_lr=u.min_lr,
        lr_decay_style=u.lr_decay_style,
        lr_warmup_steps=u.lr_warmup_iters,
        weight_decay=u.weight_decay,
        adam_beta1=u.adam_beta1,
        adam_beta2=u.adam_beta2,
        adam_eps=u.adam_eps,
        clip_grad=u.clip_grad,
        micro_batch_size=u.micro_batch_size,
        max_tokens_per_gpu=u.max_tokens_per_gpu,
        temperature=temperature,
        seed=config.seeds.seed,
        dtype=_dtype(u.update_dtype),
        sampling_dtype=_dtype(u.rollout_dtype),
        replicate=u.num_replicas,
        recompute_every=u.recompute_every,
        offload=u.offload,
        compiled="blocks" if u.compile_blocks else "none",
        attention=u.attention,
        only_train_params=u.only_train_params_name_list,
        freeze_params=u.freeze_params_name_list,
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
    learners = _fresh(run, options)
    if _restore(learners, run, version) != version:
        raise ArtifactError(f"{run.root}: no whole checkpoint of policy {version} to rebuild from")
    _check_redo(learners, run, version)
    learners.actor.publish(directory, options.sampling_dtype)


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

    Steps since that checkpoint are redone. They are left in `warm` for the stages that follow.
    """
    published = run.published(step)
    wanted = published.identity if published else f"start:{run.policy_hash(0)}"
    if warm.learners is None or warm.learners_at != wanted:
        warm.learners, warm.learners_at = None, ""
        learners = _fresh(run, options)
        restored = _restore(learners, run, step)
        if restored < run.first_step:
            raise ArtifactError(
                f"{run.root}: no whole checkpoint of policy {run.first_step}, where it was forked; "
                "fork it again"
            )
        for redone in range(restored, step):
            train(learners, redone)
            _check_redo(learners, run, redone + 1)
        warm.learners, warm.learners_at = learners, wanted
    return warm.learners


def _fresh(run: Run, options: TrainerOptions) -> Learners:
    """The learners that the run starts with."""
    settings, length = run.config.model, run.schedule_steps
    idle = run.config.algorithm.num_critic_only_steps * run.config.optimizer_steps
    actor = Actor.load(given_model(run, "model"), options, num_schedule_steps=max(1, length - idle))
    if "critic" not in rules.row_of(run.config).needs:
        return Learners(actor, None)
    rate = run.config.update.critic_lr or run.config.update.lr
    start = given_model(run, "critic_load" if settings.critic_load else "model")
    critic = Critic.load(start, replace(options, lr=rate), num_schedule_steps=length)
    return Learners(actor, critic)


def _restore(learners: Learners, run: Run, step: int) -> int:
    """Load the newest undamaged checkpoint; the policy version it stands at (0: none)."""
    for version, path, published in run.checkpoints(step):
        fault = learners.find_fault(path, published.hash)
        if not fault:
            learners.restore(path)
            return version
        _check_in_step(learners, run, version, path)
        print(f"{path}: damaged: {fault}; going back to the one before it", file=sys.stderr)
    return 0


def _check_in_step(learners: Learners, run: Run, version: int, path: Path) -> None:
    """ArtifactError for a checkpoint that is not what was published because its parts are mixed.

    Each part is whole, but they do not stand where the updates before `version` left them.
    """
    found = {name: checkpoint.steps_done(path / name) for name in learners.parts}
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
    tables = [rows(run.table(step, "update", "metrics")) for step in range(version)]
    return {
        name: sum(table.metric.count(metric) for table in tables)
        for name, metric in STEP_TAKEN.items()
    }


def _told(steps: Mapping[str, int | None]) -> str:
    return ", ".join(f"{name} at optimizer step {step}" for name, step in steps.items())


def _check_redo(learners: Learners, run: Run, version: int) -> None:
    """A redone step must give the policy that was published; ArtifactError where it does not."""
    actor, critic = learners.actor, learners.critic
    manifest = run.published(version)
    assert manifest is not None
    same_critic = critic is None or critic.weights_hash() == manifest.notes["critic"]
    if actor.weights_hash() == run.policy_hash(version) and same_critic:
        return
    difference = _first_difference(actor, run, version) if same_critic else ": the critic differs"
    raise ArtifactError(
        f"{run.root}: redoing update {version - 1} gave another policy {version} than was "
        f"published{difference}; continue on the kind of machine and "
        "with the library versions of the first run, or start another --run-dir"
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
