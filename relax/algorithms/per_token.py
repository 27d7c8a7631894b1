"""Objectives in closed form: value and slope of every token in one pass, block by block.

An autograd graph of ten temporaries of the size of the batch is mostly memory traffic. A closed
form is computed on blocks that stay in the cache; only loss, slope and flag are written out.
Shapes: B responses, T response positions (right-padded), N tokens of a block.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from relax.algorithms import masking
from relax.algorithms.masking import LOG_RATIO_LIMIT

BLOCK_TOKENS = 1 << 16

Form = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
"""(logp_N, old_logp_N, advantage_N) in float32 -> (loss_N, d loss / d logp, clipped_N)."""


def per_token(
    form: Form, logp_BT: Tensor, old_logp_BT: Tensor, advantage_BT: Tensor, mask_BT: Tensor
) -> tuple[Tensor, Tensor]:
    """(loss_BT float32, clipped_BT bool) of a closed form; only logp gets a gradient.

    Outside the mask all three are 0, whatever is there: the inputs are selected before, the
    outputs need no care because a form gives 0 for advantage 0.
    """
    tensors = torch.broadcast_tensors(logp_BT, old_logp_BT, advantage_BT, mask_BT)
    loss_BT, clipped_BT = _ClosedForm.apply(form, *tensors)  # pyright: ignore[reportGeneralTypeIssues]
    return loss_BT, clipped_BT


def ratio_and_slope(logp_N: Tensor, old_logp_N: Tensor) -> tuple[Tensor, Tensor]:
    """r = exp(clamp(logp - old_logp)) and dr / dlogp, which is 0 where the clamp holds it."""
    gap_N = logp_N - old_logp_N
    clamped_N = gap_N.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    ratio_N = clamped_N.exp()
    return ratio_N, torch.where(gap_N == clamped_N, ratio_N, 0.0)


class _ClosedForm(torch.autograd.Function):
    """Runs a form over the tokens; keeps its slope for the backward pass."""

    @staticmethod
    def forward(ctx: Any, form: Form, *tensors_BT: Tensor) -> tuple[Tensor, Tensor]:
        logp_BT = tensors_BT[0]
        flat = [x.detach().reshape(-1) for x in tensors_BT]
        loss_N = torch.empty_like(flat[0], dtype=masking.DTYPE)
        clipped_N = torch.empty_like(flat[0], dtype=torch.bool)
        slope_N = torch.empty_like(loss_N) if ctx.needs_input_grad[1] else None
        size = BLOCK_TOKENS if loss_N.device.type == "cpu" else max(len(loss_N), 1)
        for start in range(0, len(loss_N), size):
            block = slice(start, start + size)
            valid_N = flat[3][block] != 0
            inputs = (torch.where(valid_N, x[block], 0.0).to(masking.DTYPE) for x in flat[:3])
            loss_N[block], slope, clipped_N[block] = form(*inputs)
            if slope_N is not None:
                slope_N[block] = slope
        clipped_BT = clipped_N.view(logp_BT.shape)
        ctx.mark_non_differentiable(clipped_BT)
        ctx.dtype = logp_BT.dtype
        if slope_N is not None:
            ctx.save_for_backward(slope_N.view(logp_BT.shape))
        return loss_N.view(logp_BT.shape), clipped_BT

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_BT: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        (slope_BT,) = ctx.saved_tensors
        return None, (gradient_BT * slope_BT).to(ctx.dtype), None, None, None
