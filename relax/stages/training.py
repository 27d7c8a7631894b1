"""What `update` and `sft` share: the actor at a step, redo after a crash, and publishing."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from relax.config import Config
from relax.data.rows import content_hash
from relax.errors import ArtifactError
from relax.stages.perform import Inputs, Warm
from relax.store import Output, Run
from relax.store.commit import CHECKPOINTS, POLICIES
from relax.trainer.actor import Actor, TrainerOptions, policy_hash

Metrics = list[dict[str, float]]
Train = Callable[[Actor, int], Metrics]
"""Train the actor through one step of the run; one mapping of metrics per optimizer step."""


def train_and_publish(
    inputs: Inputs, output: Output, warm: Warm, *, options: TrainerOptions, train: Train
) -> Metrics:
    """Bring the actor to this step, train it, and publish its policy and checkpoint."""
    run, step = inputs.run, inputs.step
    actor = _actor_before(run, step, warm, options, train)
    warm.actor, warm.actor_at = actor, ""  # whole again only when this step is committed
    metrics = train(actor, step)
    weights = actor.weights_hash()

    def write_policy(directory: Path) -> str:
        actor.publish(directory, options.sampling_dtype)
        return weights

    def write_checkpoint(directory: Path) -> str:
        actor.save(directory)
        return content_hash(directory) if output.rank == 0 else ""

    output.publish(POLICIES, step + 1, write_policy)
    if checkpoint_due(run.config, step, output.stage):
        output.publish(CHECKPOINTS, step + 1, write_checkpoint)
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
    )


def checkpoint_due(config: Config, step: int, stage: str) -> bool:
    """Every save_interval steps and at the end; every step where nothing stays warm."""
    if config.placement_of(stage) == "job" or step == config.run.num_rollout - 1:
        return True
    interval = config.run.save_interval
    return interval > 0 and (step + 1) % interval == 0


def _actor_before(run: Run, step: int, warm: Warm, options: TrainerOptions, train: Train) -> Actor:
    """The actor as update `step` - 1 left it: warm, or the newest checkpoint and updates redone."""
    published = run.published(step)
    if warm.actor is not None and published is not None and warm.actor_at == published.identity:
        return warm.actor
    actor = Actor.load(
        Path(run.config.model.hf_checkpoint), options, num_schedule_steps=run.schedule_steps
    )
    version = _restore(actor, run, step)
    for redone in range(version, step):
        train(actor, redone)
        _check_redo(actor, run, redone + 1)
    return actor


def _restore(actor: Actor, run: Run, step: int) -> int:
    """Load the newest undamaged checkpoint; the policy version it stands at (0: none)."""
    version = step
    while found := run.newest_checkpoint(version):
        version, path = found
        manifest = run.published(version)
        assert manifest is not None and manifest.checkpoint is not None
        if content_hash(path) == manifest.checkpoint.hash:
            actor.restore(path)
            return version
        print(f"{path}: damaged; going back to the checkpoint before it", file=sys.stderr)
        version -= 1
    return 0


def _check_redo(actor: Actor, run: Run, version: int) -> None:
    """A redone update must give the policy that was published; ArtifactError where it does not."""
    if actor.weights_hash() == run.policy_hash(version):
        return
    raise ArtifactError(
        f"{run.root}: redoing update {version - 1} gave another policy {version} than was "
        f"published{_first_difference(actor, run, version)}; continue on the kind of machine and "
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
