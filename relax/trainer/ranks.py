"""The processes that train together: their group, and the small facts they exchange."""

import math
import os
from collections.abc import Mapping
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from relax.errors import ConfigError
from relax.trainer.device import backend, device_type, take_device

Thing = TypeVar("Thing")


def ensure_group() -> None:
    """Join the process group that exists or that RANK, WORLD_SIZE and MASTER_* describe.

    Without them, make one of a single rank: a lone process takes the same path as many.
    A rank that dies, or is silent for RANK_TIMEOUT_S (default 1800), makes every other rank's next
    collective raise: nothing hangs.
    """
    if dist.is_initialized():
        return
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        dist.init_process_group(backend(), store=HashStore(), rank=0, world_size=1)
        return
    take_device(int(os.environ.get("LOCAL_RANK", "0")))
    timeout = timedelta(seconds=float(os.environ.get("RANK_TIMEOUT_S", "1800")))
    dist.init_process_group(backend(), init_method="env://", timeout=timeout)


def leave_group() -> None:
    """Part from the other ranks, once all are here.

    Left to the interpreter's exit, gloo's threads abort one process in a few (seen with torch
    2.13).
    """
    dist.barrier()
    dist.destroy_process_group()


def from_first(thing: Thing) -> Thing:
    """What rank 0 gave, on every rank; the others' things are ignored."""
    box = [thing]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def num_ranks() -> int:
    """How many train together."""
    return dist.get_world_size()


def barrier() -> None:
    """Wait for all ranks."""
    dist.barrier()


def make_mesh(num_replicas: int) -> DeviceMesh:
    """Mesh (replicate, shard) over all ranks; of one dimension where num_replicas is 1."""
    device = device_type()
    num_ranks = dist.get_world_size()
    if num_ranks % num_replicas:
        raise ConfigError(
            f"--num-replicas = {num_replicas}; the number of ranks, {num_ranks}, must be a "
            "multiple of it"
        )
    if num_replicas == 1:
        return init_device_mesh(device, (num_ranks,), mesh_dim_names=("shard",))
    shape = (num_replicas, num_ranks // num_replicas)
    return init_device_mesh(device, shape, mesh_dim_names=("replicate", "shard"))


def gather(mine: Thing) -> list[Thing]:
    """What each rank gave, by rank, on every rank."""
    if dist.get_world_size() == 1:
        return [mine]
    everyone: list[Thing] = [mine] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return everyone


def add_up(sums: Mapping[str, float]) -> dict[str, float]:
    """Sum each entry over all ranks; a rank may lack names that others have.

    Exactly rounded, hence the same in whatever order the ranks answer.
    """
    parts = gather(dict(sums))
    names = sorted({name for part in parts for name in part})
    return {name: math.fsum(part.get(name, 0.0) for part in parts) for name in names}
