"""The algorithms: pure functions and one literal table of rows. This module imports no torch."""

from relax.algorithms.table import ALGORITHMS, KNOBS, Algorithm

__all__ = ["ALGORITHMS", "KNOBS", "Algorithm"]
