"""Which process of a job this one is, in the words that torch.distributed reads."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

FIRST_PORT, NUM_PORTS = 20000, 12000  # below the ports that systems hand out by themselves


@dataclass(frozen=True)
class Place:
    """This process among those of its job."""

    rank: int
    num_ranks: int
    local_rank: int
    num_local: int
    hosts: tuple[str, ...]
    job_id: str
    restart: int


def place(environ: Mapping[str, str]) -> Place:
    """Where SLURM, submitit's local executor, or nobody put this process."""
    if "SUBMITIT_LOCAL_JOB_ID" in environ:
        count = int(environ["SUBMITIT_LOCAL_NTASKS"])
        rank = int(environ["SUBMITIT_LOCAL_GLOBALID"])
        job_id = environ["SUBMITIT_LOCAL_JOB_ID"]
        return Place(rank, count, rank, count, ("127.0.0.1",), job_id, restart=0)
    if "SLURM_PROCID" in environ and environ.get("SUBMITIT_EXECUTOR") == "slurm":
        hosts = expand(environ.get("SLURM_STEP_NODELIST") or environ["SLURM_JOB_NODELIST"])
        count = int(environ["SLURM_NTASKS"])
        return Place(
            rank=int(environ["SLURM_PROCID"]),
            num_ranks=count,
            local_rank=int(environ["SLURM_LOCALID"]),
            num_local=count // len(hosts),
            hosts=tuple(hosts),
            job_id=environ["SLURM_JOB_ID"],
            restart=int(environ.get("SLURM_RESTART_COUNT", "0")),
        )
    return Place(0, 1, 0, 1, ("127.0.0.1",), str(os.getpid()), restart=0)


def variables(where: Place, *, timeout_s: float) -> dict[str, str]:
    """RANK, WORLD_SIZE and the rest of what torch.distributed reads from the environment.

    The port follows from job and restart, so that ranks need not talk to agree on it and the
    ranks of a killed attempt cannot meet those of the next.
    """
    port = FIRST_PORT + (int(where.job_id) + 7919 * where.restart) % NUM_PORTS
    return {
        "RANK": str(where.rank),
        "WORLD_SIZE": str(where.num_ranks),
        "LOCAL_RANK": str(where.local_rank),
        "LOCAL_WORLD_SIZE": str(where.num_local),
        "MASTER_ADDR": where.hosts[0],
        "MASTER_PORT": str(port),
        "RANK_TIMEOUT_S": str(timeout_s),
    }


def expand(nodes: str) -> list[str]:
    """`n[1-2,07],m3` -> n1, n2, n07, m3: SLURM's short form of a list of hosts."""
    hosts = []
    for word in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", nodes):
        hosts += _expand_word(word)
    return hosts


def _expand_word(word: str) -> list[str]:
    head, bracket, tail = word.partition("[")
    if not bracket:
        return [word]
    ranges, _, rest = tail.partition("]")
    numbers = []
    for part in ranges.split(","):
        first, _, last = part.partition("-")
        span = range(int(first), int(last or first) + 1)
        numbers += [f"{number:0{len(first)}}" for number in span]
    return [f"{head}{number}{end}" for number in numbers for end in _expand_word(rest)]
