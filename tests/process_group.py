"""Ranks of a test meet as those of a job do: through the environment, at a port that is free."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.distributed import TCPStore

from relax.trainer import ranks

_MET: list[TCPStore] = []  # a store lives as long as its ranks


def meeting_point() -> int:
    """A port of this machine at which the ranks of one launch meet; this process keeps it."""
    _MET.append(TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False))
    return _MET[-1].port


@contextmanager
def joined(rank: int, num_ranks: int, port: int, timeout_s: float) -> Iterator[None]:
    """ensure_group, and leave_group; a group that fails is left without waiting for the others."""
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_RANK": str(rank),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "RANK_TIMEOUT_S": str(timeout_s),
        # Torch's own launcher keeps the port like this, so that no other process can take it.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }
    ranks.ensure_group()
    try:
        yield
    except BaseException:
        dist.destroy_process_group()
        raise
    ranks.leave_group()
