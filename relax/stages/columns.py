"""Columns of a step as the advantage and update stages read them.

Shapes: B responses, T response positions (right-padded).
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np
import torch
from torch import Tensor

from relax.config import AlgorithmSection
from relax.schema import SCORES
from relax.store import Run, rows

SCORE_LISTS = tuple(c.name for c in SCORES.columns if c.name != "sample_id")


def counted_masks(response: SimpleNamespace, settings: AlgorithmSection) -> list[np.ndarray]:
    """The mask of each response, float32: 1 where the policy sampled the token and it counts."""
    drop_B = response.truncated & settings.mask_truncated
    return [
        mask.astype(np.float32) * (not drop)
        for mask, drop in zip(response.mask, drop_B, strict=True)
    ]


def score_lists(run: Run, step: int) -> dict[str, list[np.ndarray]]:
    """Those lists of the table `scores` that the step has, one array a response; maybe none."""
    if run.manifest(step, "score") is None:
        return {}
    scores = vars(rows(run.table(step, "score", "scores")))
    return {name: scores[name] for name in SCORE_LISTS if scores[name][0] is not None}


def padded(values_B: Sequence[np.ndarray]) -> Tensor:
    """Ragged lists as one right-padded float32 tensor."""
    padded_BT = np.zeros((len(values_B), max(map(len, values_B), default=0)), np.float32)
    for row, values in zip(padded_BT, values_B, strict=True):
        row[: len(values)] = values
    return torch.from_numpy(padded_BT)
