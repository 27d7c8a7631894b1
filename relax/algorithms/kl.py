"""Estimators of KL(policy || reference) from the sampled tokens alone (joschu.net/blog/kl-approx).

Shapes: B responses, T response positions (right-padded).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from relax.algorithms import masking
from relax.algorithms.masking import LOG_RATIO_LIMIT, valid

LOW_VAR_LIMIT = 10.0


def _k3(gap_BT: Tensor) -> Tensor:
    """exp(-q) - 1 + q, never negative; the exponent is clamped to +-20."""
    return torch.expm1(-gap_BT.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)) + gap_BT


KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "k1": lambda gap_BT: gap_BT,
    "k2": lambda gap_BT: gap_BT.square() / 2,
    "k3": _k3,
    "low_var_kl": _k3,
}
CLAMPED = frozenset({"low_var_kl"})


def estimate(
    logp_BT: Tensor,
    ref_logp_BT: Tensor,
    kind: str,
    *,
    importance_ratio_BT: Tensor | None = None,
    mask_BT: Tensor | None = None,
) -> Tensor:
    """KL of each token, with q = logp - ref_logp: k1 = q, k2 = q^2 / 2, k3 = exp(-q) - 1 + q.

    low_var_kl is k3 kept within +-10. The importance ratio multiplies before that bound, and
    carries its gradient. 0 outside the mask. Raises ValueError for a kind it does not know.
    """
    if kind not in KINDS:
        raise ValueError(f"KL estimator = {kind!r}: known: {', '.join(KINDS)}")
    if mask_BT is not None:
        logp_BT, ref_logp_BT = valid(mask_BT, logp_BT, ref_logp_BT)
    kl_BT = KINDS[kind](logp_BT.to(masking.DTYPE) - ref_logp_BT.to(masking.DTYPE))
    if importance_ratio_BT is not None:
        if mask_BT is not None:
            (importance_ratio_BT,) = valid(mask_BT, importance_ratio_BT)
        kl_BT = kl_BT * importance_ratio_BT.to(masking.DTYPE)
    return kl_BT.clamp(-LOW_VAR_LIMIT, LOW_VAR_LIMIT) if kind in CLAMPED else kl_BT
