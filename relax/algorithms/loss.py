"""The loss of one micro-batch: the row's objective under the row's weights, with its metrics.

All denominators are those of the whole optimizer step, so that losses and metrics of micro-batches
and ranks are summed, never averaged. Shapes: B responses, T response positions (right-padded).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from relax.algorithms import objectives, reduce
from relax.algorithms.table import Algorithm

Batch = Mapping[str, Tensor]
Loss = Callable[[Batch], tuple[Tensor, dict[str, Tensor]]]


@dataclass(frozen=True)
class StepCounts:
    """Counts over a whole optimizer step, known before its first forward pass."""

    num_tokens: int
    num_responses: int
    max_response_len: int


def knobs(function: Callable, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Those of `settings` that `function` takes as keyword-only arguments."""
    parameters = inspect.signature(function).parameters.values()
    names = {p.name for p in parameters if p.kind is p.KEYWORD_ONLY}
    return {name: settings[name] for name in names & settings.keys()}


def step_loss(row: Algorithm, settings: Mapping[str, Any], counts: StepCounts) -> Loss:
    """The loss function of an optimizer step: a batch of tensors in, (loss, metric sums) out."""
    objective = getattr(objectives, row.objective)
    given = knobs(objective, settings)
    per_token = settings["calculate_per_token_loss"]
    reduction = getattr(reduce, "token_mean_weights" if per_token else row.reduction)
    weights = knobs(reduction, vars(counts))

    def loss(batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        mask_BT, logp_BT = batch["mask_BT"], batch["logp_BT"]
        old_logp_BT = batch.get("old_logp_BT", logp_BT.detach())
        weight_BT = reduction(mask_BT, **weights)
        pg_BT, clipped_BT = objective(logp_BT, old_logp_BT, batch["advantage_BT"], mask_BT, **given)
        (entropy_BT,) = objectives.valid(mask_BT, batch["entropy_BT"])
        pg_loss, entropy = (weight_BT * pg_BT).sum(), (weight_BT * entropy_BT).sum()
        total = pg_loss - settings["entropy_coef"] * entropy
        sums = {"train/loss": total, "train/pg_loss": pg_loss, "train/entropy_loss": entropy}
        means = {"train/pg_clipfrac": clipped_BT.float()} | drift(batch, old_logp_BT)
        for name, value_BT in means.items():
            (value_BT,) = objectives.valid(mask_BT, value_BT)
            sums[name] = value_BT.sum() / max(counts.num_tokens, 1)
        return total, {name: value.detach() for name, value in sums.items()}

    return loss


def drift(batch: Batch, old_logp_BT: Tensor) -> dict[str, Tensor]:
    """How far the policy is from the one before the update, and from the engine's."""
    with torch.no_grad():
        mask_BT = batch["mask_BT"]
        logp_BT, old_BT, rollout_BT = objectives.valid(
            mask_BT, batch["logp_BT"], old_logp_BT, batch["rollout_logp_BT"]
        )
        engine_BT = old_BT - rollout_BT
        return {
            "train/ppo_kl": old_BT - logp_BT,
            "train/ois": objectives.exp_ratio(logp_BT, old_BT),
            "train/train_rollout_logprob_abs_diff": engine_BT.abs(),
            "train/mismatch_kl": -engine_BT,
            "train/mismatch_k3_kl": objectives.exp_ratio(old_BT, rollout_BT) - 1 - engine_BT,
        }
