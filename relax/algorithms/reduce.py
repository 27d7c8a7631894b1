"""Reductions as weights: loss = sum(weight * loss), with the counts of the whole optimizer step.

Sums over any split of the step into micro-batches or ranks therefore equal the whole.
Shapes: B responses, T response positions (right-padded).
"""

from __future__ import annotations

from torch import Tensor


def token_mean_weights(mask_BT: Tensor, *, num_tokens: int) -> Tensor:
    """1 / N: every valid token of the step counts the same (arXiv:2503.14476, eq. 12)."""
    return (mask_BT != 0).float() / max(num_tokens, 1)


def response_mean_weights(mask_BT: Tensor, *, num_responses: int) -> Tensor:
    """1 / (length * B): every response counts the same (arXiv:2402.03300, eq. 3).

    A response without a valid token has weight 0, and still counts in B.
    """
    valid_BT = (mask_BT != 0).float()
    return valid_BT / (valid_BT.sum(-1, keepdim=True).clamp(min=1) * max(num_responses, 1))


def constant_weights(mask_BT: Tensor, *, num_responses: int, max_response_len: int) -> Tensor:
    """1 / (B * L_max): a token counts the same whatever else there is (Dr.GRPO, arXiv:2503.20783).

    L_max is the limit of a response's length, not the longest response.
    """
    return (mask_BT != 0).float() / (max(num_responses, 1) * max_response_len)
