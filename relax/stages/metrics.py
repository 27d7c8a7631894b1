"""Metrics of whole stages: pure functions of columns. One that has no meaning is left out.

Shapes: B responses, G groups.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa

from relax.schema import METRICS


def metric_table(steps: Sequence[Mapping[str, float]]) -> pa.Table:
    """The table `metrics` of one mapping of names to values per optimizer step."""
    entries = [(i, name, float(v)) for i, step in enumerate(steps) for name, v in step.items()]
    place, name, value = zip(*entries, strict=True) if entries else ((), (), ())
    return METRICS.table(optimizer_step=place, metric=name, value=value)


def length_metrics(length_B: np.ndarray, truncated_B: np.ndarray) -> dict[str, float]:
    """Lengths in valid tokens, and the share of responses that the limit cut."""
    return {
        "rollout/response_len/mean": float(length_B.mean()),
        "rollout/response_len/median": float(np.median(length_B)),
        "rollout/response_len/max": float(length_B.max()),
        "rollout/response_len/min": float(length_B.min()),
        "rollout/truncated_ratio": float(truncated_B.mean()),
    }


def zero_std_frac(reward_B: np.ndarray, group_id_B: np.ndarray) -> float:
    """Share of groups whose rewards are all equal: they teach nothing."""
    groups = [reward_B[group_id_B == g] for g in np.unique(group_id_B)]
    return float(np.mean([g.min() == g.max() for g in groups]))


def pass_rates(reward_B: np.ndarray, group_id_B: np.ndarray, size: int) -> dict[str, float]:
    """rollout/passrate/pass@k for k = 1, 2, 4 .. size: unbiased (arXiv:2107.03374, eq. 1).

    A response passes when its reward is at least 1.
    """
    passed_G = [int((reward_B[group_id_B == g] >= 1).sum()) for g in np.unique(group_id_B)]
    ks = [2**i for i in range(size.bit_length()) if 2**i <= size]
    return {
        f"rollout/passrate/pass@{k}": float(np.mean([_pass_at(k, size, c) for c in passed_G]))
        for k in ks
    }


def _pass_at(k: int, size: int, passed: int) -> float:
    return 1.0 - math.comb(size - passed, k) / math.comb(size, k)
