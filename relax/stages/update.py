"""The optimizer steps of one rollout, and the policy that they make."""

from __future__ import annotations

import hashlib
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from relax.algorithms import Algorithm, rules
from relax.algorithms.loss import StepCounts, bound_metrics, step_bounds, step_loss
from relax.algorithms.objectives import M2POBounds
from relax.config import Config
from relax.stages.advantage import loaded
from relax.stages.columns import counted_masks, score_lists
from relax.stages.metrics import metric_table
from relax.stages.mismatch import Mismatch, warn
from relax.stages.perform import Inputs, Warm
from relax.stages.training import Metrics, train_and_publish, trainer_options
from relax.store import Output, Run, rows
from relax.trainer.actor import Actor, LossParts, TrainSequence


def run(config: Config, inputs: Inputs, output: Output, warm: Warm) -> None:
    """Write the table `metrics` and publish the new policy, with a checkpoint when one is due."""
    options = trainer_options(config, temperature=config.rollout.rollout_temperature)
    seconds = []

    def train(actor: Actor, step: int) -> Metrics:
        start = time.perf_counter()
        metrics = update(actor, config, inputs.run, step)
        seconds.append(time.perf_counter() - start)
        return metrics

    metrics = train_and_publish(inputs, output, warm, options=options, train=train)
    output.write("metrics", metric_table(metrics))
    warn(output, inputs.step, metrics[0], config.rollout.rollout_mismatch_warning)
    output.measure("seconds/train", seconds[-1])
    output.measure("updates redone", len(seconds) - 1)


def update(actor: Actor, config: Config, run: Run, step: int) -> Metrics:
    """All optimizer steps of one rollout; the order of its groups is seeded."""
    row, settings = rules.row_of(config), config.algorithm.model_dump()
    temperature = config.rollout.rollout_temperature
    groups = training_groups(run, step, config)
    if needs_old_logp(config, groups):
        groups = with_old_logp(actor, groups, temperature)
    custom = loaded(config.algorithm, "custom_loss_path")
    order = group_order(config.seeds.seed, step, len(groups))
    metrics = []
    for place, groups_G in enumerate(np.array_split(order, config.optimizer_steps)):
        batch = [sequence for g in groups_G for sequence in groups[g]]
        counts = StepCounts(
            num_tokens=int(sum((s.fields["mask"] != 0).sum() for s in batch)),
            num_responses=len(batch),
            max_response_len=config.rollout.rollout_max_response_len,
        )
        if counts.num_tokens == 0:
            metrics.append({"train/skipped_steps": 1.0})
            continue
        moved = place > 0 or config.algorithm.use_rollout_logprobs
        bounded = row.bounds and custom is None
        bounds = (
            whole_bounds(actor, batch, row, settings, temperature) if bounded and moved else None
        )
        loss = step_loss(row, settings, counts, bounds=bounds, custom_objective=custom)
        mismatch = Mismatch()
        found = actor.train_step(
            batch, mismatch.watching(lambda tensors, loss=loss: LossParts(*loss(tensors)))
        )
        own = bound_metrics(bounds, row) if bounded else {}
        metrics.append({"train/skipped_steps": 0.0} | _named(found) | own | mismatch.metrics())
    return metrics


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


def needs_old_logp(config: Config, groups: list[list[TrainSequence]]) -> bool:
    """Whether old_logp is asked for, and no stage before this one has computed it."""
    return "old_logp" in rules.scores_needed(config) and "old_logp" not in groups[0][0].fields


def with_old_logp(
    actor: Actor, groups: list[list[TrainSequence]], temperature: float
) -> list[list[TrainSequence]]:
    """The sequences with the log-probabilities of the weights that this update starts from."""
    sequences = [sequence for group in groups for sequence in group]
    scored = iter(actor.logp(sequences, temperature))
    return [
        [replace(s, fields={**s.fields, "old_logp": next(scored)}) for s in group]
        for group in groups
    ]


def training_groups(run: Run, step: int, config: Config) -> list[list[TrainSequence]]:
    """A rollout's groups of responses with their advantages, in the order of sample_id.

    Responses without an advantage (dropped groups) are left out.
    """
    prompt = rows(run.table(step, "rollout", "prompts"))
    response = rows(run.table(step, "rollout", "responses"))
    advantage = rows(run.table(step, "advantage", "advantages"))
    prompt_of = dict(zip(prompt.group_id.tolist(), prompt.prompt_tokens, strict=True))
    place_of = {sample_id: place for place, sample_id in enumerate(advantage.sample_id.tolist())}
    lists = {
        "mask": counted_masks(response, config.algorithm),
        "rollout_logp": response.rollout_logp,
        **score_lists(run, step),
    }
    groups: dict[int, list[TrainSequence]] = {}
    for place, sample_id in enumerate(response.sample_id.tolist()):
        if sample_id not in place_of:
            continue
        group, tokens_T = int(response.group_id[place]), response.tokens[place]
        fields = {name: values[place].astype(np.float32) for name, values in lists.items()}
        fields["advantage"] = token_advantage(advantage, place_of[sample_id], len(tokens_T))
        sequence = TrainSequence(
            sample_id=sample_id,
            tokens=np.concatenate([prompt_of[group], tokens_T]).astype(np.int64),
            response_len=len(tokens_T),
            fields=fields,
        )
        groups.setdefault(group, []).append(sequence)
    return list(groups.values())


def token_advantage(advantage: SimpleNamespace, place: int, length: int) -> np.ndarray:
    """The advantage of each token of one response, float32."""
    per_token = advantage.token_advantage[place]
    if per_token is not None:
        return per_token.astype(np.float32)
    return np.full(length, advantage.advantage[place], np.float32)


def group_order(seed: int, step: int, num_groups: int) -> np.ndarray:
    """The order in which a rollout's groups are trained on: a function of seed and step alone."""
    key = hashlib.sha256(f"update-order/{seed}/{step}".encode()).digest()
    draws = np.frombuffer(hashlib.shake_256(key).digest(8 * num_groups), dtype="<u8")
    return np.argsort(draws, kind="stable")


def _named(found: dict[str, float]) -> dict[str, float]:
    """The trainer's own numbers under the names of the metrics table."""
    own = {"grad_norm": "train/grad_norm", "lr": "train/lr"}
    named = {own.get(name, name): value for name, value in found.items()}
    named.pop("loss")  # train/loss is the same number
    return named
