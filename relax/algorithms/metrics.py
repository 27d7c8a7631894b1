"""Metrics of a whole rollout: pure functions of its columns. One without a meaning is left out.

Shapes: B responses, G groups, T response positions (right-padded).
"""

from __future__ import annotations

import math
import statistics
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from relax.algorithms.advantages import leave_one_out
from relax.algorithms.table import Algorithm
from relax.algorithms.whole_rollout import Advantages, complete_groups

REPETITION_WINDOW, REPETITION_RATIO = 10_000, 10.0
ZERO_ADVANTAGE = 1e-12


def length_metrics(length_B: Sequence[int], truncated_B: Sequence[bool]) -> dict[str, float]:
    """Lengths in valid tokens, and the share of responses that the limit cut."""
    lengths = [int(length) for length in length_B]
    return {
        "rollout/response_len/mean": statistics.fmean(lengths),
        "rollout/response_len/median": float(statistics.median(lengths)),
        "rollout/response_len/max": float(max(lengths)),
        "rollout/response_len/min": float(min(lengths)),
        "rollout/truncated_ratio": statistics.fmean(map(bool, truncated_B)),
    }


def repetition_frac(text_B: Sequence[str]) -> float:
    """Share of responses whose last 10,000 characters deflate more than tenfold: they repeat."""
    return statistics.fmean(_repeats(text) for text in text_B)


def _repeats(text: str) -> bool:
    tail = text[-REPETITION_WINDOW:].encode()
    return len(tail) > REPETITION_RATIO * len(zlib.compress(tail))


def zero_std_frac(reward_B: Iterable[float], group_id_B: Iterable[int]) -> float:
    """Share of groups whose rewards are all equal: they teach nothing."""
    return statistics.fmean(
        min(group) == max(group) for group in _by_group(reward_B, group_id_B).values()
    )


def pass_rates(reward_B: Iterable[float], group_id_B: Iterable[int], size: int) -> dict[str, float]:
    """rollout/passrate/pass@k for k = 1, 2, 4 .. size, unbiased (arXiv:2107.03374, eq. 1).

    A response passes when its reward is at least 1.
    """
    passed_G = [
        sum(reward >= 1 for reward in group) for group in _by_group(reward_B, group_id_B).values()
    ]
    ks = [2**i for i in range(size.bit_length()) if 2**i <= size]
    return {
        f"rollout/passrate/pass@{k}": statistics.fmean(_pass_at(k, size, c) for c in passed_G)
        for k in ks
    }


def _pass_at(k: int, size: int, passed: int) -> float:
    return 1.0 - math.comb(size - passed, k) / math.comb(size, k)


def _by_group(reward_B: Iterable[float], group_id_B: Iterable[int]) -> dict[int, list[float]]:
    groups: dict[int, list[float]] = {}
    for reward, group in zip(reward_B, group_id_B, strict=True):
        groups.setdefault(int(group), []).append(float(reward))
    return groups


def advantage_metrics(
    row: Algorithm,
    found: Advantages,
    mask_BT: Tensor,
    reward_B: Tensor,
    group_id_B: Tensor,
    *,
    group_size: int,
    response_len_B: Tensor,
    settings: Mapping[str, Any],
) -> dict[str, float]:
    """All metrics that the advantages of a rollout have, by the row and the settings.

    reward_B, group_id_B and response_len_B (tokens sampled, valid or not) are of all responses
    that were observed; `found` and mask_BT of the same ones.
    """
    valid_BT = mask_BT != 0
    metrics = {"rollout/zero_std_frac": zero_std_frac(reward_B.tolist(), group_id_B.tolist())}
    if valid_BT.any():
        metrics["rollout/advantages"] = found.advantage_BT[valid_BT].double().mean().item()
    if row.whitening == "whiten_tokens" and settings["normalize_advantages"]:
        metrics |= whitening_metrics(found, mask_BT)
    replaced = (
        settings["custom_reward_post_process_path"]
        or settings["custom_advantage_path"]
        or (settings["use_opd"] and settings["opd_only_reward"])
    )
    if row.advantage == leave_one_out.__name__ and not replaced:
        metrics |= leave_one_out_metrics(
            reward_B, group_id_B, mask_BT, group_size=group_size, response_len_B=response_len_B
        )
    return metrics


def whitening_metrics(found: Advantages, mask_BT: Tensor) -> dict[str, float]:
    """Moments of the advantages before and after whitening (population), over valid tokens."""
    valid_BT = mask_BT != 0
    metrics = {}
    for stage, value_BT in (("raw", found.base_BT), ("normalized", found.advantage_BT)):
        value_N = value_BT[valid_BT].double()
        metrics[f"rollout/reinforce_pp_advantage_{stage}_mean"] = value_N.mean().item()
        metrics[f"rollout/reinforce_pp_advantage_{stage}_std"] = value_N.std(correction=0).item()
    raw_N = found.base_BT[valid_BT]
    metrics["rollout/reinforce_pp_valid_token_count"] = float(len(raw_N))
    metrics["rollout/reinforce_pp_zero_variance"] = float(raw_N.min() == raw_N.max())
    return metrics


def leave_one_out_metrics(
    reward_B: Tensor,
    group_id_B: Tensor,
    mask_BT: Tensor,
    *,
    group_size: int,
    response_len_B: Tensor,
) -> dict[str, float]:
    """rollout/rloo/*: how much signal leave-one-out finds; groups of another size are left out.

    Zero means |A| < 1e-12; an empty denominator gives 0. Tensors are of all observed responses.
    """
    whole_B = complete_groups(group_id_B, group_size)
    tokens_B = (mask_BT != 0).sum(1)[whole_B].double()
    reward_W, group_W = reward_B[whole_B].double(), group_id_B[whole_B]
    observed_G, kept_G = torch.unique(group_id_B), torch.unique(group_W)
    advantage_W = leave_one_out(reward_W, group_W).abs()
    zero_W = advantage_W < ZERO_ADVANTAGE
    _, group_W = torch.unique(group_W, return_inverse=True)
    signal_G = torch.zeros(len(kept_G)).index_add_(0, group_W, (~zero_W).float())
    return {
        "rollout/rloo/baseline_mean": _share(reward_W.sum(), len(reward_W)),
        "rollout/rloo/adv_abs_mean": _share(advantage_W.double().sum(), len(advantage_W)),
        "rollout/rloo/no_signal_frac": _share(tokens_B[zero_W].sum(), tokens_B.sum().item()),
        "rollout/rloo/empty_response_frac": _share(
            (response_len_B == 0).sum(), len(response_len_B)
        ),
        "rollout/rloo/zero_adv_group_frac": _share((signal_G == 0).sum(), len(kept_G)),
        "rollout/rloo/dropped_group_frac": _share(
            torch.tensor(len(observed_G) - len(kept_G)), len(observed_G)
        ),
    }


def _share(total: Tensor, count: float) -> float:
    return total.item() / count if count else 0.0
