"""Where the time of a step went, and how well the device was used. Outside every hash."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from relax.trainer.device import synchronize


class Stopwatch:
    """Seconds by phase; on a CUDA device a phase ends when its kernels have."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._start = time.perf_counter()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time inside to the phase's."""
        start = time.perf_counter()
        yield
        synchronize()
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def total(self) -> float:
        """Seconds since the watch was made."""
        return time.perf_counter() - self._start


def step_flops(num_weights: int, num_layers: int, width: int, lengths: list[int]) -> float:
    """FLOPs of forward and backward: 6 per weight and token, and causal attention.

    Attention sees half of length^2 pairs, twice (scores and mixing): 2 * length^2 * width forward
    per layer, with the backward pass 6 * length^2 * width. width = heads * head_dim.
    """
    attention = 6 * num_layers * width * sum(length**2 for length in lengths)
    return 6.0 * num_weights * sum(lengths) + attention
