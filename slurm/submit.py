"""Submit a function by its name as a job: to SLURM, as local processes, or in this process."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from slurm import entry, records
from slurm.errors import JobError
from slurm.jobs import LOG, Job
from slurm.resources import Resources
from slurm.site import Site

FOREIGN = ("SLURM_", "SBATCH_", "SRUN_", "SUBMITIT_", "PMI_", "PMIX_", "OMPI_")
KEPT = {"SLURM_CONF"}
RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
REMEDIES = (
    ("invalid partition", "partition"),
    ("account/partition", "account or partition"),
    ("invalid account", "account"),
    ("invalid qos", "qos"),
    ("violates accounting/qos policy", "qos, account, nodes or minutes"),
    ("time limit", "minutes"),
    ("node configuration is not available", "gpus_per_node, cpus_per_task, mem_gb or constraint"),
    ("more processors", "nodes, tasks_per_node or cpus_per_task"),
    ("node count", "nodes"),
    ("invalid feature", "constraint"),
    ("reservation", "reservation"),
    ("memory", "mem_gb"),
    ("gres", "gpus_per_node"),
)
_environment_lock = threading.Lock()


@dataclass(frozen=True)
class Order:
    """What to run, where, and under which name."""

    executor: str
    """`slurm`, `local` or `debug`."""
    name: str
    target: str
    calls: tuple[Mapping[str, Any], ...]
    """Arguments of the target; several make an array, one element each."""
    attempt: str
    resources: Resources
    code: Path
    """Directory that the job imports its code from."""
    allocation: str = ""
    """Name of the allocation, for errors."""
    site: Site = field(default_factory=Site)
    labels: Mapping[str, Any] = field(default_factory=dict)
    """By which the job is found again."""
    after: str = ""
    """Id of a job of SLURM that must end well before this one may start; else it never does."""

    @property
    def facts(self) -> dict[str, Any]:
        """What claim.json and job.json say of it."""
        asked = self.resources
        return {
            **self.labels,
            "executor": self.executor,
            "name": self.name,
            "allocation": self.allocation,
            "attempt": self.attempt,
            "elements": len(self.calls),
            "num_nodes": asked.nodes,
            "num_ranks": asked.num_ranks,
            "gpus": asked.nodes * asked.gpus_per_node,
            "after": self.after,
        }

    def asked(self, folder: Path, element: int | None) -> entry.Asked:
        """What the node is told."""
        return entry.Asked(
            folder=str(folder),
            attempt=self.attempt,
            cpus_per_task=self.resources.cpus_per_task,
            minutes=self.resources.minutes,
            element=element,
        )


def submit(folder: Path, order: Order) -> Job:
    """Submit what `folder` was claimed for. Raises JobError in the cluster's own words."""
    return EXECUTORS[order.executor](folder, order, time.time())


def _record(
    folder: Path, order: Order, job_id: str, start: list[int] | None, submitted: float
) -> Job:
    claim = records.read(folder / records.CLAIM)
    assert claim is not None, folder
    job = {"job_id": job_id, "start": start, "submitted": submitted}
    records.write(folder / records.JOB, {**claim, **order.facts, **job})
    return Job(folder, order.executor, job_id, start)


def _send(executor: Any, folder: Path, order: Order) -> list[str]:
    """Hand all calls to submitit; the job's id, of an array those of its elements."""
    if len(order.calls) == 1:
        asked = order.asked(folder, None)
        return [executor.submit(entry.on_node, order.target, dict(order.calls[0]), asked).job_id]
    with executor.batch():
        jobs = [
            executor.submit(entry.on_node, order.target, dict(call), order.asked(folder, place))
            for place, call in enumerate(order.calls)
        ]
    return [job.job_id for job in jobs]


# --- slurm -----------------------------------------------------------------------------------


def slurm(folder: Path, order: Order, submitted: float) -> Job:
    """By sbatch."""
    from submitit.core.utils import FailedJobError
    from submitit.slurm.slurm import SlurmExecutor

    try:
        executor = SlurmExecutor(folder, python=order.site.python_command(_own_python()))
    except RuntimeError:
        raise JobError(
            f"{order.name}: no srun here; run the flow where jobs can be submitted, "
            "or give --executor local"
        ) from None
    executor.update_parameters(**parameters(folder, order))
    try:
        with clean_environment(), contextlib.redirect_stderr(io.StringIO()):
            job_id = _send(executor, folder, order)[0].split("_")[0]
    except (FailedJobError, OSError) as error:
        raise JobError(refusal(order, str(error))) from None
    return _record(folder, order, job_id, None, submitted)


def parameters(folder: Path, order: Order) -> dict[str, Any]:
    """Everything that submitit writes into the script, in its terms."""
    asked = order.resources
    options = asked.sbatch_options()
    own = {name: options.pop(name) for name in ("time", "nodes", "ntasks_per_node")}
    label = ["--label"] if asked.num_ranks > 1 else []
    return {
        **own,
        "job_name": order.name,
        "signal_delay_s": min(90, asked.minutes * 15),
        "stderr_to_stdout": True,
        "setup": order.site.setup_lines(order.code),
        # One log: srun's output goes where the script's goes. srun does not inherit
        # --cpus-per-task from sbatch, and leaves the other ranks alive when one dies.
        "srun_args": [
            "--output=all",
            f"--cpus-per-task={asked.cpus_per_task}",
            "--kill-on-bad-exit=1",
            "--wait=60",
            *label,
            *order.site.srun_arguments(),
        ],
        "additional_parameters": {
            **options,
            **_dependency(order.after),
            "requeue": True,
            "comment": str(folder),
            "output": str(folder / (LOG if len(order.calls) == 1 else "%a.log")),
        },
    }


def _dependency(after: str) -> dict[str, str]:
    """Of a job that could never start any more nothing is left in the queue."""
    return {"dependency": f"afterok:{after}", "kill_on_invalid_dep": "yes"} if after else {}


def script(folder: Path, order: Order) -> str:
    """The text that sbatch would be given; nothing is submitted."""
    from submitit.slurm.slurm import _make_sbatch_string

    python = order.site.python_command(_own_python())
    command = f"{python} -u -m submitit.core._submit {shlex.quote(str(folder))}"
    options = parameters(folder, order)
    if len(order.calls) > 1:
        options["map_count"] = len(order.calls)
    return _make_sbatch_string(command, folder, **options)


def refusal(order: Order, words: str) -> str:
    """The cluster's own words, and which setting to change."""
    said = " ".join(words.replace("sbatch: error: ", "").split())
    where = f"[slurm.allocations.{order.allocation}]" if order.allocation else "its allocation"
    for pattern, setting in REMEDIES:
        if pattern in said.lower():
            return f"{order.name}: sbatch refused: {said}; change {setting} of {where}"
    return f"{order.name}: sbatch refused: {said}; look at {where} and the site's limits"


def _own_python() -> str:
    return shlex.quote(sys.executable)


# --- on this machine -------------------------------------------------------------------------


def local(folder: Path, order: Order, submitted: float) -> Job:
    """As processes of this machine, one a rank, that outlive the submitter.

    The elements of an array run at the same time; the job's id names the processes of all.
    """
    from submitit.local.local import LocalExecutor

    executor = LocalExecutor(folder)
    executor.update_parameters(
        timeout_min=order.resources.minutes,
        tasks_per_node=order.resources.num_ranks,
        stderr_to_stdout=True,
    )
    # The user's own modules are found where the submitter finds them, after the copy of the code.
    path = os.pathsep.join(filter(None, (str(order.code), os.environ.get("PYTHONPATH"))))
    own = {"PYTHONPATH": path, "PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1"}
    # A flow is ended by killpg, and its jobs must not be. What other threads start meanwhile is
    # none of submitit's: its name for the module is changed, not the module.
    popen = functools.partial(subprocess.Popen, start_new_session=True)
    theirs = mock.patch("submitit.local.local.subprocess", SimpleNamespace(Popen=popen))
    with clean_environment(**own), theirs:
        pids = _send(executor, folder, order)
    starts = [records.process_start(int(pid)) or 0 for pid in pids]  # 0: over already
    return _record(folder, order, ",".join(pids), starts, submitted)


def debug(folder: Path, order: Order, submitted: float) -> Job:
    """In this process, one call after another; an error is raised as it is."""
    from submitit.local.debug import DebugExecutor

    job = _record(folder, order, str(os.getpid()), None, submitted)
    executor = DebugExecutor(folder)
    for place, call in enumerate(order.calls):
        asked = order.asked(folder, place if len(order.calls) > 1 else None)
        with clean_environment():
            error = executor.submit(entry.on_node, order.target, dict(call), asked).exception()
        if error is not None:
            raise error
    return job


EXECUTORS = {"slurm": slurm, "local": local, "debug": debug}


@contextlib.contextmanager
def clean_environment(**own: str) -> Iterator[None]:
    """Around a submission: without what an outer job left in the environment.

    sbatch reads SBATCH_* as options and hands the rest on to the job, whose ranks would believe
    themselves in the outer one. Other threads find all else in its place at every moment.
    """
    with _environment_lock:
        before = dict(os.environ)
        for name in before:
            if name not in KEPT and (name.startswith(FOREIGN) or name in RANKS):
                del os.environ[name]
        os.environ.update(own)
        try:
            yield
        finally:
            for name in os.environ.keys() - before.keys():
                os.environ.pop(name, None)
            for name, value in before.items():
                if os.environ.get(name) != value:
                    os.environ[name] = value
