"""The loss of one micro-batch: the row's objective under the row's weights, with its metrics.

All denominators are those of the whole optimizer step, so that losses and metrics of micro-batches
and ranks are summed, never averaged. Shapes: B responses, T response positions (right-padded).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from relax.algorithms import corrections, kl, objectives
from relax.algorithms.binding import knobs, resolve
from relax.algorithms.masking import exp_ratio, valid
from relax.algorithms.objectives import M2POBounds
from relax.algorithms.table import Algorithm
from relax.config import flag_of
from relax.errors import ConfigError

Batch = Mapping[str, Tensor]
Loss = Callable[[Batch], tuple[Tensor, dict[str, Tensor]]]
Objective = Callable[..., tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class StepCounts:
    """Counts over a whole optimizer step, known before its first forward pass.

    num_tokens: valid ones; num_responses: all, also those without a valid token;
    max_response_len: the limit, not the longest response.
    """

    num_tokens: int
    num_responses: int
    max_response_len: int


def step_loss(
    row: Algorithm,
    settings: Mapping[str, Any],
    counts: StepCounts,
    *,
    bounds: M2POBounds | None = None,
    custom_objective: Objective | None = None,
) -> Loss:
    """The loss function of an optimizer step: a batch of tensors in, (loss, metric sums) out.

    loss = pg_loss - entropy_coef * entropy_loss + kl_loss_coef * kl_loss, by the row's weights.
    Parts of micro-batches and ranks add up to the loss and the metrics of the step. `settings` are
    those of [algorithm]; `bounds` (rows that have them) those of `step_bounds` over the whole step.
    """
    objective = resolve(row.objective, "objectives")
    if custom_objective is not None:
        objective = selected(custom_objective, settings["custom_loss_path"])
    given = knobs(custom_objective or objective, {**settings, **margins(row, bounds)})
    weigh = _reduction(row, settings, counts)

    def loss(batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        mask_BT, logp_BT, advantage_BT = (batch[n] for n in ("mask_BT", "logp_BT", "advantage_BT"))
        old_logp_BT = old_logp(batch, settings)
        weight_BT = weigh(mask_BT)
        pg_BT, clipped_BT = objective(logp_BT, old_logp_BT, advantage_BT, mask_BT, **given)
        correction_BT, means = corrected(batch, old_logp_BT, settings)
        (entropy_BT,) = valid(mask_BT, batch["entropy_BT"])
        pg_loss = total_of(weight_BT * correction_BT * pg_BT)
        entropy_loss = total_of(weight_BT * entropy_BT)
        total = pg_loss - settings["entropy_coef"] * entropy_loss
        sums = {"train/pg_loss": pg_loss, "train/entropy_loss": entropy_loss}
        if settings["use_kl_loss"]:
            sums["train/kl_loss"] = total_of(weight_BT * reference_kl(row, batch, settings))
            total = total + settings["kl_loss_coef"] * sums["train/kl_loss"]
        sums["train/loss"] = total
        means["train/pg_clipfrac"] = clipped_BT
        means["train/pg_clipfrac_pos"] = clipped_BT * (advantage_BT > 0)
        means["train/pg_clipfrac_neg"] = clipped_BT * (advantage_BT < 0)
        tensors = (logp_BT, old_logp_BT, advantage_BT, mask_BT)
        means["train/silenced_frac"] = silenced(objective, given, *tensors)
        means |= drift(batch, old_logp_BT, settings)
        for name, value_BT in means.items():
            sums[name] = total_of(*valid(mask_BT, value_BT)) / max(counts.num_tokens, 1)
        return total, {name: value.detach() for name, value in sums.items()}

    return loss


def total_of(value_BT: Tensor) -> Tensor:
    """Sum in float64: tokens are float32, and their sum must not depend on where a step is cut."""
    return value_BT.sum(dtype=torch.float64)


def selected(objective: Objective, path: str) -> Objective:
    """The user's own objective, shown valid tokens only: it need not think of the others.

    What it gives is checked; ConfigError names `path`, where it was found.
    """

    def over_valid(logp_BT: Tensor, old_logp_BT: Tensor, advantage_BT: Tensor, mask_BT, **given):
        tensors = valid(mask_BT, logp_BT, old_logp_BT, advantage_BT)
        loss_BT, clipped_BT = _checked(objective(*tensors, mask_BT, **given), logp_BT, path)
        return valid(mask_BT, loss_BT)[0], clipped_BT

    return over_valid


def _checked(found: object, logp_BT: Tensor, path: str) -> tuple[Tensor, Tensor]:
    """The two tensors that a user's objective must give; ConfigError for anything else."""
    where = f"{flag_of('custom_loss_path')} = {path!r}"
    if not (isinstance(found, tuple) and [isinstance(x, Tensor) for x in found] == [True, True]):
        raise ConfigError(
            f"{where}: gave {type(found).__name__}; (loss_BT, clipped_BT), two tensors, is needed"
        )
    for name, value in zip(("loss_BT", "clipped_BT"), found, strict=True):
        if value.shape != logp_BT.shape:
            raise ConfigError(
                f"{where}: {name} has shape {tuple(value.shape)}; one value a token is needed, "
                f"{tuple(logp_BT.shape)} like logp_BT"
            )
    if logp_BT.requires_grad and not found[0].requires_grad:
        raise ConfigError(f"{where}: loss_BT has no gradient; compute it from logp_BT")
    return found


def critic_loss(row: Algorithm, settings: Mapping[str, Any], counts: StepCounts) -> Loss:
    """The critic's loss of an optimizer step, over value_BT, old_value_BT and return_BT."""
    objective = resolve(row.value_objective, "objectives")
    given, weigh = knobs(objective, settings), _reduction(row, settings, counts)

    def loss(batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        mask_BT = batch["mask_BT"]
        names = ("value_BT", "old_value_BT", "return_BT")
        loss_BT, clipped_BT = objective(*(batch[name] for name in names), mask_BT, **given)
        total = total_of(weigh(mask_BT) * loss_BT)
        clipped = total_of(*valid(mask_BT, clipped_BT)) / max(counts.num_tokens, 1)
        sums = {"train/critic-value_loss": total, "train/critic-value_clipfrac": clipped}
        return total, {name: value.detach() for name, value in sums.items()}

    return loss


def _reduction(
    row: Algorithm, settings: Mapping[str, Any], counts: StepCounts
) -> Callable[[Tensor], Tensor]:
    name = "token_mean_weights" if settings["calculate_per_token_loss"] else row.reduction
    reduction = resolve(name, "reduce")
    given = knobs(reduction, vars(counts))
    return lambda mask_BT: reduction(mask_BT, **given)


def old_logp(batch: Batch, settings: Mapping[str, Any]) -> Tensor:
    """The log-probabilities that logp is held against.

    The engine's with `use_rollout_logprobs`; the trainer's where they were computed; else, and in
    `true_on_policy_mode`, those of this very pass, as a constant.
    """
    if settings["use_rollout_logprobs"]:
        return batch["rollout_logp_BT"]
    if settings["true_on_policy_mode"] or "old_logp_BT" not in batch:
        return batch["logp_BT"].detach()
    return batch["old_logp_BT"]


def step_bounds(row: Algorithm, settings: Mapping[str, Any], batch: Batch) -> M2POBounds | None:
    """Bounds of an optimizer step from all its tokens, None for a row that has none.

    `batch` holds logp_BT of a pass without gradient over the whole step, beside the usual fields.
    """
    if not row.bounds:
        return None
    find = resolve(row.bounds, "objectives")
    tensors = batch["logp_BT"], old_logp(batch, settings), batch["advantage_BT"], batch["mask_BT"]
    return find(*tensors, **knobs(find, settings))


def margins(row: Algorithm, bounds: M2POBounds | None) -> dict[str, float]:
    """The bounds as knobs of the objective; where r is known to be 1, none are needed."""
    if not row.bounds:
        return {}
    found = bounds or objectives.UNBOUNDED
    return {"eps_low": found.eps_low, "eps_high": found.eps_high}


def bound_metrics(bounds: M2POBounds | None, row: Algorithm) -> dict[str, float]:
    """Metrics of a step's bounds: of the whole step, so they are not sums of parts."""
    if not row.bounds:
        return {}
    found = bounds or objectives.UNBOUNDED
    moments = {
        "train/ppo_kl_m2_before": found.m2_before,
        "train/ppo_kl_m2_after": found.m2_after,
    }
    if found.eps_high == objectives.UNBOUNDED.eps_high:
        return moments
    return moments | {"train/m2po_eps_low": found.eps_low, "train/m2po_eps_high": found.eps_high}


def corrected(
    batch: Batch, old_logp_BT: Tensor, settings: Mapping[str, Any]
) -> tuple[Tensor, dict[str, Tensor]]:
    """What the policy gradient of each token is multiplied by, and per-token metrics of it."""
    mask_BT = batch["mask_BT"]
    factor_BT, means = (mask_BT != 0).float(), {}
    weights = {"use_tis": corrections.tis_weight, "use_icepop": corrections.icepop_weight}
    for weight in (function for name, function in weights.items() if settings[name]):
        old_BT, rollout_BT = valid(mask_BT, old_logp_BT.detach(), batch["rollout_logp_BT"])
        weight_BT, ratio_BT = (
            weight(old_BT, rollout_BT, mask_BT, **knobs(weight, settings)),
            exp_ratio(old_BT, rollout_BT),
        )
        factor_BT = factor_BT * weight_BT
        means["train/tis"] = ratio_BT
        means["train/tis_clipfrac"] = weight_BT != ratio_BT
        means["train/tis_abs"] = (ratio_BT - 1).abs()
    if settings["use_opsm"]:
        tensors = (batch["logp_BT"].detach(), old_logp_BT, batch["advantage_BT"], mask_BT)
        keep = corrections.sequence_keep_mask
        keep_BT = keep(*tensors, **knobs(keep, settings)) != 0
        factor_BT = factor_BT * keep_BT
        means["train/opsm_clipfrac"] = ~keep_BT
    return factor_BT, means


def reference_kl(row: Algorithm, batch: Batch, settings: Mapping[str, Any]) -> Tensor:
    """KL to the reference of each token, by kl_loss_type or the row's own estimator."""
    mask_BT, ratio_BT = batch["mask_BT"], None
    if settings["use_unbiased_kl"]:
        ratio_BT = exp_ratio(*valid(mask_BT, batch["logp_BT"], old_logp(batch, settings)))
    return kl.estimate(
        batch["logp_BT"],
        batch["ref_logp_BT"],
        settings["kl_loss_type"] or row.kl,
        importance_ratio_BT=ratio_BT,
        mask_BT=mask_BT,
    )


def silenced(objective: Objective, given: Mapping[str, Any], *tensors_BT: Tensor) -> Tensor:
    """Where a valid token with an advantage gets no gradient at all from the objective, bool.

    The tensors are the objective's: logp, old_logp, advantage and mask.
    """
    logp_BT, old_logp_BT, advantage_BT, mask_BT = (x.detach() for x in tensors_BT)
    with torch.enable_grad():
        leaf_BT = logp_BT.clone().requires_grad_()
        loss_BT, _ = objective(leaf_BT, old_logp_BT, advantage_BT, mask_BT, **given)
        (gradient_BT,) = torch.autograd.grad(loss_BT.sum(), leaf_BT)
    return (mask_BT != 0) & (advantage_BT != 0) & (gradient_BT == 0)


@torch.no_grad()
def drift(batch: Batch, old_logp_BT: Tensor, settings: Mapping[str, Any]) -> dict[str, Tensor]:
    """How far the policy is from the one before the update, and the engine's from the teacher."""
    mask_BT = batch["mask_BT"]
    logp_BT, old_BT = valid(mask_BT, batch["logp_BT"], old_logp_BT)
    means = {"train/ppo_kl": old_BT - logp_BT, "train/ois": exp_ratio(logp_BT, old_BT)}
    if settings["use_opd"]:
        engine_BT, teacher_BT = valid(mask_BT, batch["rollout_logp_BT"], batch["teacher_logp_BT"])
        means["train/opd_kl_term"] = engine_BT - teacher_BT
    return means


def mismatch(trainer_logp_N: Tensor, rollout_logp_N: Tensor) -> dict[str, Tensor]:
    """How far the trainer is from the engine that sampled, by valid token: what is to be averaged.

    The trainer's log-probabilities are those before the update: with d = trainer - rollout, |d|,
    -d and exp(d) - 1 - d.
    """
    gap_N = trainer_logp_N - rollout_logp_N
    return {
        "train/train_rollout_logprob_abs_diff": gap_N.abs(),
        "train/mismatch_kl": -gap_N,
        "train/mismatch_k3_kl": kl.estimate(rollout_logp_N, trainer_logp_N, "k3"),
    }
