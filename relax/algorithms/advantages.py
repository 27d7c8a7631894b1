"""Advantages from rewards. Computed in float64, returned as float32.

Shapes: B responses, T response positions (right-padded).
"""

from __future__ import annotations

import torch
from torch import Tensor


def group_normalized(
    reward_B: Tensor, group_id_B: Tensor, *, std_normalization: bool = True
) -> Tensor:
    """GRPO: (r - mean) / (std + 1e-6) within each group, std unbiased (arXiv:2402.03300, sec. 4.1).

    Groups whose rewards are all equal, and groups of one, give exact zeros.
    """
    centred_B, group_B, size_G = _centred(reward_B, group_id_B)
    if not std_normalization:
        return centred_B.float()
    square_G = torch.zeros_like(size_G).index_add_(0, group_B, centred_B.square())
    std_G = (square_G / (size_G - 1).clamp(min=1)).sqrt()
    return (centred_B / (std_G + 1e-6)[group_B]).float()


def _centred(reward_B: Tensor, group_id_B: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rewards less their group's mean (exact zeros where a group is constant), group of each, sizes.

    Raises ValueError naming the places of non-finite rewards.
    """
    bad = (~torch.isfinite(reward_B)).nonzero().flatten().tolist()
    if bad:
        raise ValueError(f"reward: not finite at {bad[:8]}: {reward_B[bad[:8]].tolist()}")
    reward_B = reward_B.double()
    _, group_B = torch.unique(group_id_B, return_inverse=True)
    size_G = torch.bincount(group_B).double()
    mean_G = torch.zeros_like(size_G).index_add_(0, group_B, reward_B) / size_G
    low_G = torch.full_like(size_G, torch.inf).scatter_reduce_(0, group_B, reward_B, "amin")
    high_G = torch.full_like(size_G, -torch.inf).scatter_reduce_(0, group_B, reward_B, "amax")
    centred_B = torch.where((low_G == high_G)[group_B], 0.0, reward_B - mean_G[group_B])
    return centred_B, group_B, size_G
