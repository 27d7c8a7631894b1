"""Advantages from rewards. Computed in float64, returned as float32, 0 outside the mask.

Shapes: B responses, G groups, T response positions (right-padded).
"""

from __future__ import annotations

import torch
from torch import Tensor

STD_FLOOR = 1e-6
VARIANCE_FLOOR = 1e-8
BLOCK_ROWS = 512


def raw_reward(reward_B: Tensor) -> Tensor:
    """The reward itself (`disable_rewards_normalization`). ValueError where it is not finite."""
    return _finite(reward_B).float()


def group_normalized(
    reward_B: Tensor, group_id_B: Tensor, *, std_normalization: bool = True
) -> Tensor:
    """GRPO: (r - mean) / (std + 1e-6) within each group, std unbiased (arXiv:2402.03300, sec. 4.1).

    Groups whose rewards are all equal, and groups of one, give exact zeros. Without
    `std_normalization` rewards are only centred. ValueError for a reward that is not finite.
    """
    centred_B, group_B, size_G = _centred(reward_B, group_id_B)
    if not std_normalization:
        return centred_B.float()
    square_G = torch.zeros_like(size_G).index_add_(0, group_B, centred_B.square())
    std_G = (square_G / (size_G - 1).clamp(min=1)).sqrt()
    return (centred_B / (std_G + STD_FLOOR)[group_B]).float()


def group_centered(reward_B: Tensor, group_id_B: Tensor) -> Tensor:
    """Dr.GRPO: r - mean of the group (arXiv:2503.20783, sec. 3.2); exact zeros for equal rewards.

    ValueError for a reward that is not finite.
    """
    return _centred(reward_B, group_id_B)[0].float()


def leave_one_out(reward_B: Tensor, group_id_B: Tensor) -> Tensor:
    """RLOO: r_i less the mean of the others = G / (G - 1) * (r_i - mean) (arXiv:2402.14740, eq. 8).

    ValueError for a group of one, and for a reward that is not finite.
    """
    centred_B, group_B, size_G = _centred(reward_B, group_id_B)
    if (size_G < 2).any():
        alone = torch.unique(group_id_B)[size_G < 2].tolist()
        raise ValueError(f"group {alone[:8]}: one response; leave-one-out needs at least 2")
    return (centred_B * (size_G / (size_G - 1))[group_B]).float()


def kl_to_go_return(
    reward_B: Tensor,
    kl_BT: Tensor,
    mask_BT: Tensor,
    *,
    kl_coef: float,
    gamma: float = 1.0,
) -> Tensor:
    """REINFORCE++: the discounted sum of what is still to come (arXiv:2501.03262, eq. 5).

    A valid token earns -kl_coef * kl (kl = old_logp - ref_logp, k1), the last one the reward too.
    A masked hole costs no discount; a response without a valid token gives zeros.
    ValueError for a reward, or a kl of a valid token, that is not finite.
    """
    reward_B = _finite(reward_B)
    return_BT = torch.empty(mask_BT.shape, device=mask_BT.device)
    for rows in _row_blocks(mask_BT):
        valid_BT = mask_BT[rows] != 0
        valid_TB = valid_BT.t().contiguous()
        reward_TB = _time_major("kl", kl_BT, valid_BT, rows).mul_(-kl_coef)
        row_B, last_B = _last_valid(valid_BT)
        reward_TB[last_B, row_B] += reward_B[rows][row_B]
        holes = _holes(valid_TB)
        return_TB = _accumulate(reward_TB, valid_TB, gamma, holes)
        return_BT[rows] = _cut(return_TB, valid_TB, holes).float().t()
    return return_BT


def token_rewards(
    reward_B: Tensor, kl_BT: Tensor | None, mask_BT: Tensor, *, kl_coef: float = 0.0
) -> Tensor:
    """What `gae` takes: the reward on the last valid token, less kl_coef * kl on every one.

    ValueError for a reward that is not finite.
    """
    reward_B, valid_BT = _finite(reward_B), mask_BT != 0
    if kl_BT is None:
        reward_BT = torch.zeros(mask_BT.shape, dtype=torch.float64, device=mask_BT.device)
    else:
        reward_BT = torch.where(valid_BT, kl_BT.detach(), 0.0).double().mul_(-kl_coef)
    row_B, last_B = _last_valid(valid_BT)
    reward_BT[row_B, last_B] += reward_B[row_B]
    return reward_BT


def gae(
    token_reward_BT: Tensor,
    value_BT: Tensor,
    mask_BT: Tensor,
    *,
    gamma: float = 1.0,
    lambd: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """GAE (arXiv:1506.02438, eq. 16): (advantage, return = advantage + value).

    delta_t = r_t + gamma V_{t+1} - V_t; A_t = delta_t + gamma lambda A_{t+1}, over valid tokens
    only: a masked hole is skipped, and the value after the last valid token is 0. What a token
    hands to the one before it, G_t = gamma V_t + gamma lambda A_t, is computed by one recursion:
    return_t = r_t + G_{t+1} and G_t = gamma (1 - lambda) V_t + gamma lambda return_t.
    ValueError for a reward or a value of a valid token that is not finite.
    """
    advantage_BT, return_BT = (torch.empty(mask_BT.shape, device=mask_BT.device) for _ in "AR")
    for rows in _row_blocks(mask_BT):
        valid_BT = mask_BT[rows] != 0
        reward_TB = _time_major("reward", token_reward_BT, valid_BT, rows)
        value_TB = _time_major("value", value_BT, valid_BT, rows)
        valid_TB = valid_BT.t().contiguous()
        holes = _holes(valid_TB)
        handed_TB = (value_TB * (gamma - gamma * lambd)).add_(reward_TB, alpha=gamma * lambd)
        _accumulate(handed_TB, valid_TB, gamma * lambd, holes)
        reward_TB[:-1].add_(handed_TB[1:])
        return_BT[rows] = _cut(reward_TB, valid_TB, holes).float().t()
        advantage_BT[rows] = _cut(reward_TB.sub_(value_TB), valid_TB, holes).float().t()
    return advantage_BT, return_BT


def whiten_tokens(advantage_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """REINFORCE++: (A - mean) / sqrt(max(variance, 1e-8)) over all valid tokens.

    The variance is that of the population (arXiv:2501.03262, eq. 6). Give it the whole rollout.
    Equal advantages give exact zeros. ValueError without a valid token.
    """
    return _whitened(advantage_BT, mask_BT, lambda total, count: max(total / count, VARIANCE_FLOOR))


def whiten_unbiased(advantage_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """`normalize_advantages`: (A - mean) / sqrt(variance + 1e-8) over all valid tokens, unbiased.

    Give it the whole rollout. One valid token, or equal ones, give exact zeros. ValueError without
    a valid token.
    """
    return _whitened(
        advantage_BT, mask_BT, lambda total, count: total / (count - 1) + VARIANCE_FLOOR
    )


def distilled(
    advantage_BT: Tensor,
    rollout_logp_BT: Tensor,
    teacher_logp_BT: Tensor,
    mask_BT: Tensor,
    *,
    opd_kl_coef: float,
) -> Tensor:
    """On-policy distillation: A_t - opd_kl_coef * (rollout_logp - teacher_logp), a constant.

    thinkingmachines.ai/blog/on-policy-distillation; arXiv:2306.13649.
    """
    valid_BT = mask_BT != 0
    advantage_BT, rollout_BT, teacher_BT = (
        torch.where(valid_BT, x.detach(), 0.0).double()
        for x in (advantage_BT, rollout_logp_BT, teacher_logp_BT)
    )
    return (advantage_BT - opd_kl_coef * (rollout_BT - teacher_BT)).float()


def broadcast(advantage_B: Tensor, mask_BT: Tensor) -> Tensor:
    """One scalar a response on each of its valid tokens."""
    return torch.where(mask_BT != 0, advantage_B.float()[:, None], 0.0)


def _finite(reward_B: Tensor) -> Tensor:
    """Rewards in float64; ValueError naming the places of those that are NaN or infinite."""
    reward_B = reward_B.detach().double()
    if not torch.isfinite(reward_B).all():
        bad = (~torch.isfinite(reward_B)).nonzero().flatten()[:8]
        raise ValueError(f"reward: not finite at {bad.tolist()}: {reward_B[bad].tolist()}")
    return reward_B


def _centred(reward_B: Tensor, group_id_B: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rewards less their group's mean, the group of each, the size of each group.

    Exact zeros where a group's rewards are equal: a mean is only nearly each of them, and what is
    left would be divided by a standard deviation as small.
    """
    reward_B = _finite(reward_B)
    _, group_B = torch.unique(group_id_B, return_inverse=True)
    size_G = torch.bincount(group_B).double()
    mean_G = torch.zeros_like(size_G).index_add_(0, group_B, reward_B) / size_G
    low_G = torch.full_like(size_G, torch.inf).scatter_reduce_(0, group_B, reward_B, "amin")
    high_G = torch.full_like(size_G, -torch.inf).scatter_reduce_(0, group_B, reward_B, "amax")
    centred_B = torch.where((low_G == high_G)[group_B], 0.0, reward_B - mean_G[group_B])
    return centred_B, group_B, size_G


def _row_blocks(mask_BT: Tensor) -> list[slice]:
    """Blocks of responses, small enough to stay near the processor while time runs backwards."""
    return [slice(i, i + BLOCK_ROWS) for i in range(0, len(mask_BT), BLOCK_ROWS)]


def _last_valid(valid_BT: Tensor) -> tuple[Tensor, Tensor]:
    """Responses that have a valid token, and the place of the last one of each."""
    if valid_BT.shape[1] == 0:
        nothing = torch.zeros(0, dtype=torch.long, device=valid_BT.device)
        return nothing, nothing
    place_T = torch.arange(1, valid_BT.shape[1] + 1, dtype=torch.int32, device=valid_BT.device)
    last_B = (valid_BT * place_T).amax(1)
    row_B = last_B.nonzero().flatten()
    return row_B, last_B[row_B].long() - 1


def _time_major(name: str, value_BT: Tensor, valid_bT: Tensor, rows: slice) -> Tensor:
    """The rows' values, float64 [T, b], 0 where masked: a step in time is one contiguous row.

    ValueError naming the responses where a valid one is not finite.
    """
    value_bT = torch.where(valid_bT, value_BT[rows].detach(), 0.0)
    value_Tb = value_bT.t().contiguous().double()
    if not value_Tb.sum().isfinite():
        bad = ((~torch.isfinite(value_bT)).any(1).nonzero().flatten() + rows.start)[:8]
        raise ValueError(f"{name}: not finite on a valid token of responses {bad.tolist()}")
    return value_Tb


def _holes(valid_TB: Tensor) -> bool:
    """Whether a valid token follows a masked one somewhere; without, a mask is a length."""
    if min(valid_TB.shape) == 0 or len(valid_TB) == 1:
        return False
    return bool((valid_TB[1:] > valid_TB[:-1]).view(torch.uint8).amax())  # any() is 30 times slower


def _accumulate(own_TB: Tensor, valid_TB: Tensor, decay: float, holes: bool) -> Tensor:
    """In place: own[t] += decay * own[t + 1], from the end; own is 0 where masked.

    A hole hands on undiminished what comes after it.
    """
    own = own_TB.unbind(0)
    if not holes:
        for t in range(len(own) - 2, -1, -1):
            own[t].add_(own[t + 1], alpha=decay)
        return own_TB
    decays = torch.where(valid_TB, decay, 1.0).double().unbind(0)
    for t in range(len(own) - 2, -1, -1):
        own[t].addcmul_(decays[t], own[t + 1])
    return own_TB


def _cut(value_TB: Tensor, valid_TB: Tensor, holes: bool) -> Tensor:
    """0 where masked; without holes, only padding is masked, and nothing came there."""
    return torch.where(valid_TB, value_TB, 0.0) if holes else value_TB


def _whitened(advantage_BT: Tensor, mask_BT: Tensor, variance) -> Tensor:
    """(A - mean) / sqrt(variance(sum of squares, count)) where valid, 0 elsewhere."""
    valid_BT = mask_BT != 0
    advantage_N = advantage_BT.detach()[valid_BT].double()
    if len(advantage_N) == 0:
        raise ValueError("advantage: no valid token in the whole rollout; nothing can be whitened")
    whitened_BT = torch.zeros(mask_BT.shape, device=mask_BT.device)
    if advantage_N.min() < advantage_N.max():
        centred_N = advantage_N - advantage_N.mean()
        total = centred_N.square().sum().item()
        whitened_BT[valid_BT] = (centred_N / variance(total, len(centred_N)) ** 0.5).float()
    return whitened_BT
