"""Objectives to minimise, per token: (logp_BT, old_logp_BT, advantage_BT, mask_BT) -> (loss, clipped).

A masked position changes nothing, whatever it holds. Shapes: B responses, T response positions.
"""

from __future__ import annotations

import torch
from torch import Tensor

LOG_RATIO_LIMIT = 20.0  # finite inputs never give Inf or NaN


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
    (dual clip, arXiv:1912.09729). Raises ValueError when eps_clip_c <= 1.
    """
    if eps_clip_c is not None and not eps_clip_c > 1:
        raise ValueError(f"eps_clip_c = {eps_clip_c}: must be greater than 1")
    logp_BT, old_logp_BT, advantage_BT = valid(mask_BT, logp_BT, old_logp_BT, advantage_BT)
    ratio_BT = exp_ratio(logp_BT, old_logp_BT)
    high = eps_clip if eps_clip_high is None else eps_clip_high
    plain_BT = -ratio_BT * advantage_BT
    bounded_BT = -ratio_BT.clamp(1 - eps_clip, 1 + high) * advantage_BT
    loss_BT = torch.maximum(plain_BT, bounded_BT)
    if eps_clip_c is not None:
        cap_BT = torch.where(advantage_BT < 0, -eps_clip_c * advantage_BT, torch.inf)
        loss_BT = torch.minimum(loss_BT, cap_BT)
    return loss_BT, bounded_BT > plain_BT


def valid(mask_BT: Tensor, *tensors_BT: Tensor) -> tuple[Tensor, ...]:
    """The tensors in float32 with zeros outside the mask, selected before any arithmetic."""
    return tuple(torch.where(mask_BT != 0, x_BT, 0.0).float() for x_BT in tensors_BT)


def exp_ratio(logp_BT: Tensor, old_logp_BT: Tensor) -> Tensor:
    """exp(logp - old_logp), the log-ratio clamped to +-20."""
    return (logp_BT - old_logp_BT).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
