"""Selecting the valid tokens before any arithmetic, and ratios that cannot overflow.

Shapes: B responses, T response positions (right-padded).
"""

from __future__ import annotations

import torch
from torch import Tensor

DTYPE = torch.float32  # of objectives, whatever the model's; a proof may set it to float64
LOG_RATIO_LIMIT = 20.0  # finite log-probabilities never give Inf or NaN


def valid(mask_BT: Tensor, *tensors_BT: Tensor) -> tuple[Tensor, ...]:
    """The tensors in float32 with zeros outside the mask, selected before any arithmetic."""
    return tuple(torch.where(mask_BT != 0, x_BT, 0.0).to(DTYPE) for x_BT in tensors_BT)


def exp_ratio(logp_BT: Tensor, old_logp_BT: Tensor) -> Tensor:
    """exp(logp - old_logp), the log-ratio clamped to +-20."""
    return (logp_BT - old_logp_BT).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def response_mean(value_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Mean over each response's valid tokens, float64 [..., 1]; 0 for a response without any."""
    valid_BT = mask_BT != 0
    total_B1 = torch.where(valid_BT, value_BT, 0.0).sum(-1, keepdim=True, dtype=torch.float64)
    return total_B1 / valid_BT.sum(-1, keepdim=True).clamp(min=1)
