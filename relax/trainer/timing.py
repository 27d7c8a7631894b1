"""Where the time of a step went, and how well the device was used. Outside every hash."""

import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

# Dense bfloat16 peak in FLOP/s by a word of the device's name.
PEAK_FLOPS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "B200": 2250e12}


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
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def total(self) -> float:
        """Seconds since the watch was made."""
        return time.perf_counter() - self._start


def step_flops(num_weights: int, num_layers: int, width: int, lengths: list[int]) -> float:
    """FLOPs of forward and backward: 6 per weight and token, 6 per attended pair and channel.

    Causal attention sees half of length^2 pairs, twice (scores and mixing): with a forward of
    2 * length^2 * width and a backward of twice that, 6 * length^2 * width per layer.
    """
    attention = 6 * num_layers * width * sum(length**2 for length in lengths)
    return 6.0 * num_weights * sum(lengths) + attention


def peak_flops() -> float | None:
    """The device's peak, where it is known."""
    if not torch.cuda.is_available():
        return None
    name = torch.cuda.get_device_name()
    return next((peak for word, peak in PEAK_FLOPS.items() if word in name), None)


def peak_memory_gib() -> float:
    """Largest memory held so far: of the CUDA allocator, else of the process."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
