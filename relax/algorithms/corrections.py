"""Corrections of the policy gradient for engine mismatch and for responses that drifted.

They multiply the objective after it is computed, and nothing else. All are constants: no gradient.
Shapes: B responses, T response positions (right-padded).
"""

from __future__ import annotations

import torch
from torch import Tensor

from relax.algorithms.masking import exp_ratio, response_mean, valid


@torch.no_grad()
def tis_weight(
    old_logp_BT: Tensor,
    rollout_logp_BT: Tensor,
    mask_BT: Tensor,
    *,
    tis_clip_low: float = 0.0,
    tis_clip: float = 2.0,
) -> Tensor:
    """Truncated importance sampling: clamp(exp(old_logp - rollout_logp), low, high).

    The ratio of the trainer's probability to the engine's (fengyao.notion.site/off-policy-rl).
    """
    ratio_BT = exp_ratio(*valid(mask_BT, old_logp_BT, rollout_logp_BT))
    return torch.where(mask_BT != 0, ratio_BT.clamp(tis_clip_low, tis_clip), 0.0)


@torch.no_grad()
def icepop_weight(
    old_logp_BT: Tensor,
    rollout_logp_BT: Tensor,
    mask_BT: Tensor,
    *,
    tis_clip_low: float,
    tis_clip: float,
) -> Tensor:
    """IcePop: the ratio inside [low, high], ends included; outside, the token is dropped.

    ringtech.notion.site/icepop; arXiv:2510.18855, sec. 3.
    """
    ratio_BT = exp_ratio(*valid(mask_BT, old_logp_BT, rollout_logp_BT))
    inside_BT = (mask_BT != 0) & (ratio_BT >= tis_clip_low) & (ratio_BT <= tis_clip)
    return torch.where(inside_BT, ratio_BT, 0.0)


@torch.no_grad()
def sequence_keep_mask(
    logp_BT: Tensor,
    old_logp_BT: Tensor,
    advantage_BT: Tensor,
    mask_BT: Tensor,
    *,
    opsm_delta: float = 1e-4,
) -> Tensor:
    """The mask less the tokens with A < 0 of responses whose mean(old_logp - logp) > delta.

    Off-policy sequence masking (arXiv:2512.02556, sec. 3.1).
    """
    logp_BT, old_BT, advantage_BT = valid(mask_BT, logp_BT, old_logp_BT, advantage_BT)
    drift_B1 = response_mean(old_BT - logp_BT, mask_BT)
    keep_BT = (mask_BT != 0) & ~((advantage_BT < 0) & (drift_B1 > opsm_delta))
    return keep_BT if mask_BT.dtype == torch.bool else torch.where(keep_BT, mask_BT, 0)
