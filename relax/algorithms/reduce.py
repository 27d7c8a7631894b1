"""Reductions as weights: loss = sum(weight * loss), with the counts of the whole optimizer step.

Sums over any split of the step into micro-batches or ranks therefore equal the whole.
Shapes: B responses, T response positions (right-padded).
"""

from __future__ import annotations

from torch import Tensor


def token_mean_weights(mask_BT: Tensor, *, num_tokens: int) -> Tensor:
    """1 / N: every valid token of the step counts the same."""
    return (mask_BT != 0).float() / max(num_tokens, 1)


def response_mean_weights(mask_BT: Tensor, *, num_responses: int) -> Tensor:
    """1 / (length * B): every response counts the same; an empty one has weight 0, yet counts in B."""
    valid_BT = (mask_BT != 0).float()
    return valid_BT / (valid_BT.sum(-1, keepdim=True).clamp(min=1) * num_responses)


def constant_weights(mask_BT: Tensor, *, num_responses: int, max_response_len: int) -> Tensor:
    """1 / (B * L_max), as Dr.GRPO has it (arXiv:2503.20783)."""
    return (mask_BT != 0).float() / (num_responses * max_response_len)
