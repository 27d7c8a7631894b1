"""The processes that train together: their group, and the small sums they exchange."""

import math
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore


def ensure_group() -> None:
    """Join the process group that exists, or make one of a single rank.

    A lone process takes the same path as many: only the group's size differs.
    """
    if dist.is_initialized():
        return
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)


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
