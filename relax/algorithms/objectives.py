"""Objectives to minimise: (logp_BT, old_logp_BT, advantage_BT, mask_BT) -> (loss_BT, clipped_BT).

With r = exp(logp - old_logp) and A the advantage. A masked position changes nothing, whatever it
holds; only logp gets a gradient.
Shapes: B responses, T response positions (right-padded), H harmful tokens, N tokens of a block.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from relax.algorithms import masking
from relax.algorithms.masking import LOG_RATIO_LIMIT, exp_ratio, response_mean, valid
from relax.algorithms.per_token import per_token, ratio_and_slope

__all__ = [
    "UNBOUNDED",
    "M2POBounds",
    "cispo",
    "gspo",
    "m2po",
    "m2po_bounds",
    "ppo_clip",
    "reinforce",
    "sapo",
    "value_clip",
]

SAPO_CLIPPED = 0.9  # a gate that passes less than this share of the gradient counts as clipping
LARGEST_EXPONENT = 700.0  # of a double


def ppo_clip(
    logp_BT: Tensor,
    old_logp_BT: Tensor,
    advantage_BT: Tensor,
    mask_BT: Tensor,
    *,
    eps_clip: float = 0.2,
    eps_clip_high: float | None = None,
    eps_clip_c: float | None = None,
) -> tuple[Tensor, Tensor]:
    """PPO-Clip: max(-rA, -clip(r, 1 - eps, 1 + eps_high) A) (arXiv:1707.06347, eq. 7).

    With `eps_clip_c`, the loss of a negative advantage is capped at -eps_clip_c * A
    (dual clip, arXiv:1912.09729, eq. 5). Raises ValueError when eps_clip_c <= 1.
    """
    if eps_clip_c is not None and not eps_clip_c > 1:
        raise ValueError(f"eps_clip_c = {eps_clip_c}: must be greater than 1")
    low, high = 1 - eps_clip, 1 + _upper(eps_clip, eps_clip_high)

    def form(logp_N: Tensor, old_logp_N: Tensor, advantage_N: Tensor):
        ratio_N, slope_N = ratio_and_slope(logp_N, old_logp_N)
        return _clip(ratio_N, slope_N, advantage_N, (low, high), eps_clip_c)

    return per_token(form, logp_BT, old_logp_BT, advantage_BT, mask_BT)


def reinforce(
    logp_BT: Tensor, old_logp_BT: Tensor, advantage_BT: Tensor, mask_BT: Tensor
) -> tuple[Tensor, Tensor]:
    """REINFORCE: -sg(A) * logp; nothing is clipped (RLOO, arXiv:2402.14740, eq. 7)."""

    def form(logp_N: Tensor, _: Tensor, advantage_N: Tensor):
        slope_N = -advantage_N
        return slope_N * logp_N, slope_N, torch.zeros_like(logp_N, dtype=torch.bool)

    return per_token(form, logp_BT, old_logp_BT, advantage_BT, mask_BT)


def cispo(
    logp_BT: Tensor,
    old_logp_BT: Tensor,
    advantage_BT: Tensor,
    mask_BT: Tensor,
    *,
    eps_clip: float = 0.2,
    eps_clip_high: float | None = None,
) -> tuple[Tensor, Tensor]:
    """CISPO: -sg(clip(r, 1 - eps, 1 + eps_high)) * sg(A) * logp (arXiv:2506.13585, eq. 4).

    The ratio is a bounded constant, on both sides, so no token loses its gradient. eps_clip >= 1
    leaves the ratio without a lower bound.
    """
    low, high = 1 - eps_clip, 1 + _upper(eps_clip, eps_clip_high)

    def form(logp_N: Tensor, old_logp_N: Tensor, advantage_N: Tensor):
        ratio_N = exp_ratio(logp_N, old_logp_N)
        weight_N = ratio_N.clamp(low, high)
        slope_N = (weight_N * advantage_N).neg_()
        return slope_N * logp_N, slope_N, weight_N != ratio_N

    return per_token(form, logp_BT, old_logp_BT, advantage_BT, mask_BT)


def gspo(
    logp_BT: Tensor,
    old_logp_BT: Tensor,
    advantage_BT: Tensor,
    mask_BT: Tensor,
    *,
    eps_clip: float = 0.2,
    eps_clip_high: float | None = None,
) -> tuple[Tensor, Tensor]:
    """GSPO-token: PPO-Clip with s = exp(mean of logp - old_logp), one ratio for a response.

    Token t's ratio is sg(s) * exp(logp - sg(logp)): its value is s, its gradient s on its own
    token (arXiv:2507.18071, eq. 13). A row of the tensors must hold a whole response.
    """
    low, high = 1 - eps_clip, 1 + _upper(eps_clip, eps_clip_high)
    with torch.no_grad():
        new_BT, old_BT = valid(mask_BT, logp_BT, old_logp_BT)
        mean_B1 = response_mean(new_BT - old_BT, mask_BT)
        ratio_B1 = mean_B1.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp().to(masking.DTYPE)

    def form(_: Tensor, ratio_N: Tensor, advantage_N: Tensor):
        return _clip(ratio_N, ratio_N, advantage_N, (low, high), None)

    return per_token(form, logp_BT, ratio_B1.expand_as(logp_BT), advantage_BT, mask_BT)


def sapo(
    logp_BT: Tensor,
    old_logp_BT: Tensor,
    advantage_BT: Tensor,
    mask_BT: Tensor,
    *,
    sapo_tau_pos: float = 1.0,
    sapo_tau_neg: float = 1.05,
) -> tuple[Tensor, Tensor]:
    """SAPO: -(4 / tau) * sigmoid(tau (r - 1)) * A, tau by the sign of A (arXiv:2511.20347, eq. 5).

    Its gradient is -4g(1 - g) r A with g the sigmoid: a gate of 1 at r = 1 that never shuts.
    `clipped` where the gate 4g(1 - g) is below 0.9.
    """

    def form(logp_N: Tensor, old_logp_N: Tensor, advantage_N: Tensor):
        ratio_N, slope_N = ratio_and_slope(logp_N, old_logp_N)
        tau_N = torch.where(advantage_N > 0, sapo_tau_pos, sapo_tau_neg)
        scaled_N = tau_N * (ratio_N - 1)
        opening_N = torch.sigmoid(scaled_N)
        gate_N = 4 * opening_N * torch.sigmoid(-scaled_N)  # 1 - sigmoid(x) would round to 0
        loss_N = -4 / tau_N * opening_N * advantage_N
        return loss_N, -gate_N * slope_N * advantage_N, gate_N < SAPO_CLIPPED

    return per_token(form, logp_BT, old_logp_BT, advantage_BT, mask_BT)


def m2po(
    logp_BT: Tensor,
    old_logp_BT: Tensor,
    advantage_BT: Tensor,
    mask_BT: Tensor,
    *,
    eps_low: float,
    eps_high: float,
) -> tuple[Tensor, Tensor]:
    """M2PO: PPO-Clip within the bounds that m2po_bounds found for the step (arXiv:2510.01161)."""
    return ppo_clip(
        logp_BT, old_logp_BT, advantage_BT, mask_BT, eps_clip=eps_low, eps_clip_high=eps_high
    )


class M2POBounds(NamedTuple):
    """Clip margins of an optimizer step, and the second moment before and after.

    Example: M2POBounds(eps_low=1.0, eps_high=math.inf, m2_before=4e-3, m2_after=4e-3): no clip.
    """

    eps_low: float
    eps_high: float
    m2_before: float
    m2_after: float


UNBOUNDED = M2POBounds(1.0, math.inf, 0.0, 0.0)


@torch.no_grad()
def m2po_bounds(
    logp_BT: Tensor,
    old_logp_BT: Tensor,
    advantage_BT: Tensor,
    mask_BT: Tensor,
    *,
    m2po_kl2_budget: float = 0.01,
    m2po_miniclip_low: float = 0.3,
    m2po_miniclip_high: float = 0.5,
) -> M2POBounds:
    """Bounds that cap the second moment of the log-ratio over harmful tokens at the budget.

    Harmful: A > 0 and r > 1, or A < 0 and r < 1. tau solves sum(min(x, tau^2)) = n * budget over
    their n values x = (log r)^2; margins are max(1 - e^-tau, miniclip_low) and
    max(e^tau - 1, miniclip_high) (arXiv:2510.01161, sec. 4). Give it the tokens of the whole step.
    """
    valid_BT = mask_BT != 0
    gap_N = logp_BT[valid_BT].double() - old_logp_BT[valid_BT].double()
    harmful_N = advantage_BT[valid_BT].double().sign() * gap_N > 0
    square_H = gap_N[harmful_N].square()
    if len(square_H) == 0:
        return UNBOUNDED
    before = square_H.mean().item()
    if before <= m2po_kl2_budget:
        return M2POBounds(1.0, math.inf, before, before)
    cap = _water_level(square_H, m2po_kl2_budget)
    tau, after = math.sqrt(cap), square_H.clamp(max=cap).mean().item()
    low, high = -math.expm1(-tau), math.expm1(tau) if tau < LARGEST_EXPONENT else math.inf
    return M2POBounds(max(low, m2po_miniclip_low), max(high, m2po_miniclip_high), before, after)


def value_clip(
    value_BT: Tensor,
    old_value_BT: Tensor,
    return_BT: Tensor,
    mask_BT: Tensor,
    *,
    value_clip: float = 0.2,
) -> tuple[Tensor, Tensor]:
    """Critic: max((v - R)^2, (v_old + clip(v - v_old, +-c) - R)^2), without a factor 1/2.

    `clipped` where |v - v_old| > c. Only value gets a gradient (arXiv:2005.12729, sec. 3).
    """
    old_BT, return_BT = (x.detach() for x in valid(mask_BT, old_value_BT, return_BT))
    (value_BT,) = valid(mask_BT, value_BT)
    step_BT = value_BT - old_BT
    bounded_BT = old_BT + step_BT.clamp(-value_clip, value_clip)
    loss_BT = torch.maximum((value_BT - return_BT).square(), (bounded_BT - return_BT).square())
    return loss_BT, step_BT.detach().abs() > value_clip


def _upper(eps_clip: float, eps_clip_high: float | None) -> float:
    return eps_clip if eps_clip_high is None else eps_clip_high


def _clip(
    ratio_N: Tensor,
    slope_N: Tensor,
    advantage_N: Tensor,
    band: tuple[float, float],
    cap: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """PPO-Clip's form; a token whose bound is the larger loss has no slope."""
    push_N = -advantage_N
    plain_N = ratio_N * push_N
    loss_N = torch.maximum(plain_N, ratio_N.clamp(*band).mul_(push_N))
    clipped_N = loss_N > plain_N
    slope_N = torch.where(clipped_N, 0.0, slope_N * push_N)
    if cap is not None:
        bound_N = torch.where(push_N > 0, cap * push_N, math.inf)
        slope_N = torch.where(loss_N > bound_N, 0.0, slope_N)
        loss_N = torch.minimum(loss_N, bound_N)
    return loss_N, slope_N, clipped_N


def _water_level(square_H: Tensor, budget: float) -> float:
    """The level c with mean(min(x, c)) = budget; budget is below the mean of x.

    With x sorted and S_k the sum of the k smallest, c is (n * budget - S_k) / (n - k) at the first
    k for which that is no more than the next value.
    """
    ordered_H = square_H.sort().values
    count = len(ordered_H)
    below_H = torch.cat([ordered_H.new_zeros(1), ordered_H.cumsum(0)[:-1]])
    left_H = torch.arange(count, 0, -1, dtype=torch.float64, device=ordered_H.device)
    level_H = (count * budget - below_H) / left_H
    found_H = level_H <= ordered_H
    found_H[-1] = True  # only rounding can make it false there
    return max(level_H[found_H][0].item(), 0.0)
