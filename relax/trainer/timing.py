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


def step_flops(
    num_weights: int, num_layers: int, width: int, num_tokens: int, num_pairs: int
) -> float:
    """FLOPs of forward and backward: 6 per weight and token, and causal attention.

    num_tokens: that go through the weights, a shared prompt's once; num_pairs: sum of length^2.
    Attention sees half of the pairs, twice (scores and mixing): 2 * num_pairs * width forward
    per layer, with the backward pass 6 * num_pairs * width. width = heads * head_dim.
    """
    return 6.0 * num_weights * num_tokens + 6.0 * num_layers * width * num_pairs
