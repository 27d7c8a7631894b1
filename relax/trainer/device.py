"""Every branch between CUDA and the CPU: devices, backends, clocks and memory.

Shapes: n and v a tile of response tokens and of the vocabulary, H hidden size.
"""

import ctypes
import gc
import resource

import torch
from torch import Tensor

# Dense bfloat16 peak in FLOP/s by a word of the device's name.
PEAK_FLOPS = {"B200": 2250e12, "H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12}
# Parameters of mallopt(3).
MALLOPT_TRIM_THRESHOLD, MALLOPT_MMAP_THRESHOLD = -1, -3


def device_type() -> str:
    """Where this process computes."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def take_device(rank: int) -> None:
    """Give each rank of a node a CUDA device of its own; ranks of a node are consecutive."""
    if torch.cuda.is_available():
        torch.cuda.set_device(rank % torch.cuda.device_count())


def backend() -> str:
    """Process-group backend; gloo stays for host tensors: checkpoints, offload, small facts."""
    return "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"


def synchronize() -> None:
    """Wait for the device, so that a clock read after it tells the truth."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def free_memory() -> None:
    """Give what nothing refers to any more, cycles included, back to the device's processes."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def folds_heads(states: Tensor) -> bool:
    """Whether the attention kernel for these reads a key once for all heads that share it.

    On a CUDA device float32 would fall to the one that keeps all scores.
    """
    return not states.is_cuda or states.dtype != torch.float32


def keep_freed_memory() -> None:
    """On the CPU: let this process keep, from now on, what tensors give back, for the next ones.

    glibc hands big blocks back to the kernel, which clears every page of the next activation
    anew: 8 % of a small step. Up to 32 MiB (its own upper limit) come from the heap now.
    """
    mallopt = None if torch.cuda.is_available() else getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(MALLOPT_MMAP_THRESHOLD, 32 * 2**20)
        mallopt(MALLOPT_TRIM_THRESHOLD, 2**30)


def peak_memory_gib() -> float:
    """Largest memory held so far: of the CUDA allocator, else of the process."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def peak_flops() -> float | None:
    """The device's peak, where it is known."""
    if not torch.cuda.is_available():
        return None
    name = torch.cuda.get_device_name()
    return next((peak for word, peak in PEAK_FLOPS.items() if word in name), None)


def wider(tensor: Tensor) -> torch.dtype:
    """float32, or the tensor's own dtype where that is wider."""
    return torch.promote_types(tensor.dtype, torch.float32)


def add_product(total_ij: Tensor, left_ik: Tensor, right_kj: Tensor) -> None:
    """total += left @ right in place; total is at least float32 whatever the factors are."""
    if left_ik.dtype == right_kj.dtype == total_ij.dtype:
        total_ij.addmm_(left_ik, right_kj)
    else:
        total_ij += left_ik @ right_kj


def wide_logits(hidden_nH: Tensor, weight_vH: Tensor) -> Tensor:
    """hidden @ weight.T in float32, also from bfloat16 factors: logits are not rounded."""
    if hidden_nH.dtype == wider(hidden_nH):
        return hidden_nH @ weight_vH.T
    if hidden_nH.is_cuda:
        return torch.mm(hidden_nH, weight_vH.T, out_dtype=torch.float32)
    return hidden_nH.float() @ weight_vH.float().T
