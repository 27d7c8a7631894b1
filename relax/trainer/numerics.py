"""What makes two runs on the same machine equal to the bit: one call, before the first tensor."""

import os

import torch
import torch.utils.deterministic


def make_deterministic(num_threads: int) -> None:
    """Fix the thread count and refuse operations without a deterministic form.

    num_threads: CPU threads of one rank (> 0). Reductions split over threads, so that another
    count is another result in the last bits. Randomness is not seeded here: it comes from
    (seed, step, sample), never from a generator that a rank carries along.
    """
    if num_threads < 1:
        raise ValueError(f"make_deterministic: num_threads = {num_threads}; at least 1")
    # cuBLAS reads this once, when its first handle is made.
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    os.environ["NCCL_ALGO"] = "Ring"
    # transformers asks flash attention for its deterministic backward pass where this is set.
    os.environ["FLASH_ATTENTION_DETERMINISTIC"] = "1"
    torch.set_num_threads(num_threads)
    torch.use_deterministic_algorithms(True)
    # Filling fresh memory with NaN finds bugs, costs time and changes no result of correct code.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
