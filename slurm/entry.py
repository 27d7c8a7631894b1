"""What runs first on a node: ranks, signals, a look at the CPUs; then the target, by its name."""

from __future__ import annotations

import importlib
import os
import socket
import subprocess
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurm import ranks, records, signals
from slurm.errors import JobError


@dataclass(frozen=True)
class Asked:
    """What the submitter asked for, as the node needs to know it."""

    folder: str
    attempt: str
    cpus_per_task: int
    minutes: int
    element: int | None = None
    """Place in the array, None where the job is none."""


def run(target: str, arguments: dict[str, Any]) -> Any:
    """Call `package.module:function` with keyword `arguments`."""
    module, function = target.split(":")
    return getattr(importlib.import_module(module), function)(**arguments)


def on_node(target: str, arguments: dict[str, Any], asked: Asked) -> None:
    """Run the target in this rank of a job, with `attempt` and `stop` added to its arguments.

    The attempt's name holds job and restart: a requeued job keeps its id, and what is left of its
    first start must not meet the second. A target that returns False has left work: it was asked
    to stop, and the job goes back into the queue, or who waits for it submits the rest.
    """
    if "SUBMITIT_EXECUTOR" in os.environ:  # not in the submitter's own process
        signals.listen()
        forget_half_result()
    where = ranks.place(os.environ)
    os.environ.update(ranks.variables(where, timeout_s=60.0 * asked.minutes))
    record = _Record(asked, where)
    try:
        record.running()
        check_cpus(asked.cpus_per_task, where)
        attempt = f"{asked.attempt}-{where.job_id}-{where.restart}"
        whole = run(target, {**arguments, "attempt": attempt, "stop": signals.asked})
    except BaseException:
        record.ended("FAILED", traceback.format_exc())
        raise
    if whole is False:
        record.ended("STOPPED")
        requeue(where)
    else:
        record.ended("COMPLETED")


def forget_half_result() -> None:
    """Remove what a start leaves that was killed while submitit wrote its result.

    A requeued job keeps its id: submitit would find the file, take it for another's, and fail the
    job after its work is done.
    """
    from submitit import JobEnvironment

    result = JobEnvironment().paths.result_pickle
    result.with_name(f"{result.name}.save_tmp").unlink(missing_ok=True)


def check_cpus(wanted: int, where: ranks.Place) -> None:
    """Log the CPUs that this rank may use; JobError when they are fewer than asked for."""
    have = len(os.sched_getaffinity(0))
    host = socket.gethostname()
    print(f"rank {where.rank} of {where.num_ranks} on {host}: {have} CPUs, {wanted} asked for")
    if have < wanted:
        raise JobError(
            f"rank {where.rank} on {host}: may use {have} CPUs, cpus_per_task = {wanted}; "
            "check srun's --cpus-per-task and the node's task affinity, or ask for fewer"
        )


def requeue(where: ranks.Place) -> None:
    """Send this job back into the queue; rank 0 does it for all.

    Where that cannot be asked for (a container has no scontrol) the job ends as it is.
    """
    if where.rank != 0 or "SLURM_JOB_ID" not in os.environ:
        return
    words = ["scontrol", "requeue", where.job_id]
    try:
        subprocess.run(words, check=True, timeout=60)
    except (OSError, subprocess.SubprocessError) as error:
        print(f"{' '.join(words)}: {error}; the job ends, what is left is for another", flush=True)


class _Record:
    """node-<restart>.json, written by rank 0."""

    def __init__(self, asked: Asked, where: ranks.Place) -> None:
        element = "" if asked.element is None else f".{asked.element}"
        self.path = Path(asked.folder) / f"node-{where.restart}{element}.json"
        self.mine = where.rank == 0
        self.facts: dict[str, Any] = {
            "restart": where.restart,
            "element": asked.element,
            "hosts": list(where.hosts) if len(where.hosts) > 1 else [socket.gethostname()],
            "cpus": len(os.sched_getaffinity(0)),
            "started": time.time(),
        }

    def running(self) -> None:
        self._write({"state": "RUNNING"})

    def ended(self, state: str, error: str = "") -> None:
        self._write({"state": state, "ended": time.time(), "error": error})

    def _write(self, more: dict[str, Any]) -> None:
        self.facts |= more
        if self.mine:
            records.write(self.path, self.facts)
