"""The processes that train together: their group, and the small sums they exchange."""

import math
import os
from collections.abc import Mapping
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

Value = TypeVar("Value")


def ensure_group() -> None:
    """Join the process group that exists or that RANK, WORLD_SIZE and MASTER_* describe.

    Without them, make one of a single rank: a lone process takes the same path as many.
    A rank that waits longer than RANK_TIMEOUT_S (default 1800) for the others fails.
    """
    if dist.is_initialized():
        return
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
        return
    if torch.cuda.is_available():
        local = int(os.environ.get("LOCAL_RANK", "0"))
        torch.cuda.set_device(local % torch.cuda.device_count())
    timeout = timedelta(seconds=float(os.environ.get("RANK_TIMEOUT_S", "1800")))
    dist.init_process_group(backend, init_method="env://", timeout=timeout)


def from_first(value: Value) -> Value:
    """What rank 0 gave, on every rank; the others' values are ignored."""
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def barrier() -> None:
    """Wait for all ranks."""
    dist.barrier()


def add_up(sums: Mapping[str, float]) -> dict[str, float]:
    """Sum each entry over all ranks; a rank may lack names that others have.

    Exactly rounded, hence the same in whatever order the ranks answer.
    """
    if dist.get_world_size() == 1:
        return dict(sums)
    parts: list[dict[str, float]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(parts, dict(sums))
    names = sorted({name for part in parts for name in part})
    return {name: math.fsum(part.get(name, 0.0) for part in parts) for name in names}
