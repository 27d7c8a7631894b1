"""Metrics as the table `metrics`; what they mean is relax.algorithms.metrics' business."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pyarrow as pa

from relax.schema import METRICS


def metric_table(steps: Sequence[Mapping[str, float]]) -> pa.Table:
    """The table `metrics` of one mapping of names to values per optimizer step."""
    entries = [(i, name, float(v)) for i, step in enumerate(steps) for name, v in step.items()]
    place, name, value = zip(*entries, strict=True) if entries else ((), (), ())
    return METRICS.table(optimizer_step=place, metric=name, value=value)
