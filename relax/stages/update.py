"""The optimizer steps of one rollout, and the policy that they make."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from relax.algorithms import Algorithm, rules
from relax.algorithms.loss import (
    StepCounts,
    bound_metrics,
    critic_loss,
    step_bounds,
    step_loss,
)
from relax.algorithms.objectives import M2POBounds
from relax.config import Config
from relax.stages.columns import counted_masks, score_lists
from relax.stages.functions import loaded
from relax.stages.metrics import metric_table
from relax.stages.mismatch import Mismatch, warn
from relax.stages.perform import Inputs, Warm
from relax.stages.training import (
    Learners,
    Metrics,
    inspection_dir,
    train_and_publish,
    trainer_options,
)
from relax.store import Output, Run, rows
from relax.trainer.actor import Actor
from relax.trainer.critic import Critic
from relax.trainer.sequences import LossParts, TrainSequence

KNOWN_WHEN_SKIPPING = {
    "train/loss",
    "train/pg_loss",
    "train/pg_clipfrac_pos",
    "train/pg_clipfrac_neg",
    "train/silenced_frac",
    "train/grad_norm",
    "train/lr",
    "train/skipped_steps",
    "train/m2po_eps_low",
    "train/m2po_eps_high",
    "train/ppo_kl_m2_before",
    "train/ppo_kl_m2_after",
}
"""Metrics that responses without advantage add nothing to."""


def run(config: Config, inputs: Inputs, output: Output, warm: Warm) -> None:
    """Write the table `metrics` and publish the new policy, with a checkpoint when one is due."""
    options = trainer_options(config, temperature=config.rollout.rollout_temperature)
    seconds, timing = [], {}

    def train(learners: Learners, step: int) -> Metrics:
        start = time.perf_counter()
        for learner in learners.parts.values():
            learner.restart_timing()
        metrics = update(learners, config, inputs.run, step, output.notes)
        seconds.append(time.perf_counter() - start)
        timing.update({name: learner.timing for name, learner in learners.parts.items()})
        return metrics

    metrics = train_and_publish(inputs, output, warm, options=options, train=train)
    output.write("metrics", metric_table(metrics))
    warn(output, inputs.step, metrics[0], config.rollout.rollout_mismatch_warning)
    output.measure("seconds/train", seconds[-1])
    for part, prefix in (("actor", "trainer/"), ("critic", "trainer/critic-")):
        for name, value in timing.get(part, {}).items():
            output.measure(prefix + name, value)
    output.measure("updates redone", len(seconds) - 1)


def update(
    learners: Learners, config: Config, run: Run, step: int, notes: dict[str, Any]
) -> Metrics:
    """All optimizer steps of one rollout, from its tables.

    Leaves in `notes` which groups, by group_id, each of them took, in their order.
    """
    groups = training_groups(run, step, config)
    ids, cut = [*groups], group_steps(config, step, len(groups))
    notes["groups"] = [[ids[g] for g in groups_G] for groups_G in cut]
    kept = inspection_dir(run, step)
    custom = loaded(config, "custom_loss_path", run.sources)
    return optimizer_steps(
        learners, config, step, [*groups.values()], custom=custom, inspect_dir=kept
    )


def optimizer_steps(
    learners: Learners,
    config: Config,
    step: int,
    groups: list[list[TrainSequence]],
    *,
    custom: Callable[..., Any] | None = None,
    inspect_dir: Path | None = None,
) -> Metrics:
    """Cut a rollout's groups, in their seeded order, into optimizer steps and take them.

    `custom` takes the place of the row's objective.
    `inspect_dir` gets the batch of a third non-finite step in a row, which ends the run.
    """
    metrics = []
    for place, groups_G in enumerate(group_steps(config, step, len(groups))):
        batch = [sequence for g in groups_G for sequence in groups[g]]
        counts = StepCounts(
            num_tokens=int(sum((s.fields["mask"] != 0).sum() for s in batch)),
            num_responses=len(batch),
            max_response_len=config.rollout.rollout_max_response_len,
        )
        if counts.num_tokens == 0:
            metrics.append({"train/skipped_steps": 1.0})
            continue
        found = {}
        if learners.critic is not None:
            found |= critic_step(learners.critic, batch, config, counts, inspect_dir=inspect_dir)
        if step >= config.algorithm.num_critic_only_steps:
            first = place == 0
            found |= actor_step(
                learners.actor,
                batch,
                config,
                counts,
                is_first=first,
                custom=custom,
                inspect_dir=inspect_dir,
            )
        metrics.append(found)
    return metrics


def actor_step(
    actor: Actor,
    batch: list[TrainSequence],
    config: Config,
    counts: StepCounts,
    *,
    is_first: bool,
    custom: Callable[..., Any] | None = None,
    inspect_dir: Path | None = None,
) -> dict[str, float]:
    """One optimizer step of the actor. `is_first`: of its rollout, so that the ratio is known."""
    row, settings = rules.row_of(config), config.algorithm.model_dump()
    moved = not is_first or config.algorithm.use_rollout_logprobs
    bounded = row.bounds and custom is None
    temperature = config.rollout.rollout_temperature
    bounds = whole_bounds(actor, batch, row, settings, temperature) if bounded and moved else None
    loss = step_loss(row, settings, counts, bounds=bounds, custom_objective=custom)
    trained = moving(batch) if config.update.skip_zero_advantage else batch
    # The trainer's log-probabilities before the update: not the batch's where the engine's stand
    # in their place, but this pass's own while nothing has moved.
    hidden = config.algorithm.use_rollout_logprobs
    mismatch = Mismatch(own=hidden)

    def parts(tensors: Mapping[str, torch.Tensor]) -> LossParts:
        return LossParts(*loss(tensors))

    measured = is_first or not hidden
    watched = mismatch.watching(parts) if measured else parts
    found = actor.train_step(trained, watched, inspect_dir=inspect_dir)
    own = bound_metrics(bounds, row) if bounded else {}
    metrics = _named(found, "train/") | own | overlap_metric(batch, counts)
    if config.update.skip_zero_advantage:
        metrics = {name: metrics[name] for name in metrics if name in KNOWN_WHEN_SKIPPING}
    return metrics | (mismatch.metrics() if measured else {})


def moving(batch: list[TrainSequence]) -> list[TrainSequence]:
    """The responses whose advantage is not 0 throughout: the others have no gradient.

    At least one goes through, for a step without a gradient still moves by its momentum.
    """
    moved = [s for s in batch if (s.fields["advantage"] * s.fields["mask"] != 0).any()]
    return moved or batch[:1]


def critic_step(
    critic: Critic,
    batch: list[TrainSequence],
    config: Config,
    counts: StepCounts,
    *,
    inspect_dir: Path | None = None,
) -> dict[str, float]:
    """One optimizer step of the critic."""
    settings = config.algorithm.model_dump()
    loss = critic_loss(rules.row_of(config), settings, counts)
    found = critic.train_step(
        batch, lambda tensors: LossParts(*loss(tensors)), inspect_dir=inspect_dir
    )
    return _named(found, "train/critic-")


def overlap_metric(batch: list[TrainSequence], counts: StepCounts) -> dict[str, float]:
    """Mean over valid tokens of the overlap with the teacher's likeliest tokens, if it is known."""
    if "top_k_overlap" not in batch[0].fields:
        return {}
    total = sum(float((s.fields["top_k_overlap"] * s.fields["mask"]).sum()) for s in batch)
    return {"train/opd_topk_overlap": total / counts.num_tokens}


def whole_bounds(
    actor: Actor,
    batch: list[TrainSequence],
    row: Algorithm,
    settings: dict[str, Any],
    temperature: float,
) -> M2POBounds | None:
    """Clip bounds from all tokens of an optimizer step: one more pass, without gradient."""
    fields = {
        f"{name}_BT": torch.from_numpy(np.concatenate([s.fields[name] for s in batch]))
        for name in batch[0].fields
    }
    logp_N = torch.from_numpy(np.concatenate(actor.logp(batch, temperature)))
    return step_bounds(row, settings, {**fields, "logp_BT": logp_N})


def training_groups(run: Run, step: int, config: Config) -> dict[int, list[TrainSequence]]:
    """group_id -> responses with all that the losses read, in the order of sample_id.

    Responses without an advantage (dropped groups) are left out.
    """
    response = rows(run.table(step, "rollout", "responses"))
    prompt = rows(run.table(step, "rollout", "prompts"))
    advantage = rows(run.table(step, "advantage", "advantages"))
    place_of = {sample_id: place for place, sample_id in enumerate(advantage.sample_id.tolist())}
    lists = {
        "mask": counted_masks(response, config.algorithm),
        "rollout_logp": response.rollout_logp,
        **score_lists(run, step),
    }
    if "value" in lists:
        lists["old_value"] = lists.pop("value")  # `value` is what the critic says in training
    groups: dict[int, list[TrainSequence]] = {}
    for place, sequence in enumerate(response_sequences(prompt, response)):
        if sequence.sample_id not in place_of:
            continue
        fields = {name: values[place].astype(np.float32) for name, values in lists.items()}
        row = place_of[sequence.sample_id]
        fields["advantage"] = token_advantage(advantage, row, sequence.response_len)
        if advantage.token_return[row] is not None:
            fields["return"] = advantage.token_return[row].astype(np.float32)
        group = groups.setdefault(int(response.group_id[place]), [])
        group.append(replace(sequence, fields=fields))
    return groups


def response_sequences(prompt: SimpleNamespace, response: SimpleNamespace) -> list[TrainSequence]:
    """Prompt and response tokens of a rollout, in the order of its responses, without fields."""
    prompt_of = dict(zip(prompt.group_id.tolist(), prompt.prompt_tokens, strict=True))
    triples = zip(
        response.sample_id.tolist(), response.group_id.tolist(), response.tokens, strict=True
    )
    return [
        TrainSequence(
            sample_id=sample_id,
            tokens=np.concatenate([prompt_of[group], tokens_T]).astype(np.int64),
            response_len=len(tokens_T),
            fields={},
        )
        for sample_id, group, tokens_T in triples
    ]


def token_advantage(advantage: SimpleNamespace, place: int, length: int) -> np.ndarray:
    """The advantage of each token of one response, float32."""
    per_token = advantage.token_advantage[place]
    if per_token is not None:
        return per_token.astype(np.float32)
    return np.full(length, advantage.advantage[place], np.float32)


def group_steps(config: Config, step: int, num_groups: int) -> list[np.ndarray]:
    """Places of the groups that each optimizer step of a rollout takes."""
    order = group_order(config.seeds.seed, step, num_groups)
    return np.array_split(order, config.optimizer_steps)


def group_order(seed: int, step: int, num_groups: int) -> np.ndarray:
    """The order in which a rollout's groups are trained on: a function of seed and step alone."""
    key = hashlib.sha256(f"update-order/{seed}/{step}".encode()).digest()
    draws = np.frombuffer(hashlib.shake_256(key).digest(8 * num_groups), dtype="<u8")
    return np.argsort(draws, kind="stable")


def _named(found: dict[str, float], prefix: str) -> dict[str, float]:
    """The trainer's own numbers under the names of the metrics table."""
    own = {"grad_norm", "lr", "skipped_steps"}
    named = {prefix + name if name in own else name: value for name, value in found.items()}
    named.pop("loss")  # train/loss, or the critic's value_loss, is the same number
    return named
