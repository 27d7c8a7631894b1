"""Submit a function by name as a job, and find it again after the submitter died."""

from __future__ import annotations

import functools
import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from submitit.local.local import LocalExecutor

from slurm import entry
from slurm.errors import JobError

RECORD = "job.json"


@dataclass(frozen=True)
class Job:
    """One submission. `folder` is its record: job.json, submitit's files, the log."""

    folder: Path
    job_id: str
    start: int | None
    """Start time of the process, clock ticks since boot: a pid alone can be another's by now."""

    def alive(self) -> bool:
        """Whether the job may still do something."""
        return self.start is not None and process_start(int(self.job_id)) == self.start

    def cancel(self) -> None:
        """End the job and everything it started."""
        if self.alive():
            os.killpg(int(self.job_id), 9)

    def log_tail(self, num_lines: int = 15) -> str:
        """The last lines of what the job wrote to stderr, else to stdout."""
        for suffix in ("err", "out"):
            logs = sorted(self.folder.glob(f"{self.job_id}_*.{suffix}"))
            lines = [line for log in logs for line in log.read_text(errors="replace").splitlines()]
            if lines:
                return "\n".join(lines[-num_lines:])
        return "(it wrote nothing)"


def claim(jobs: Path, name: str) -> Path:
    """A new folder JOBS/NAME-<attempt>, made by mkdir: no two submitters get the same one."""
    jobs.mkdir(parents=True, exist_ok=True)
    attempt = len(list(jobs.glob(f"{name}-[0-9]*"))) + 1
    while True:
        folder = jobs / f"{name}-{attempt}"
        try:
            folder.mkdir()
        except FileExistsError:
            attempt += 1
            continue
        return folder


def submit(
    folder: Path, target: str, arguments: dict[str, Any], *, timeout_min: int, code: Path
) -> Job:
    """Start `target` as a process of this machine that outlives the submitter.

    `code` is the directory that the job imports its code from.
    """
    executor = LocalExecutor(folder)
    executor.update_parameters(timeout_min=timeout_min, tasks_per_node=1)
    with _detached(), _environment(PYTHONPATH=str(code), PYTHONUNBUFFERED="1"):
        pid = executor.submit(entry.run, target, arguments).job_id
    job = Job(folder, pid, process_start(int(pid)))
    scratch = folder / f".{RECORD}"
    scratch.write_text(json.dumps({"job_id": job.job_id, "start": job.start, "target": target}))
    scratch.rename(folder / RECORD)
    return job


def find(jobs: Path, name: str) -> Job | None:
    """The living job of an earlier submission under `name`, None when there is none."""
    return next(iter(living(jobs, f"{name}-[0-9]*")), None)


def living(jobs: Path, pattern: str = "*") -> list[Job]:
    """The jobs recorded in folders that match `pattern` and that are still alive."""
    records = {
        path.parent: json.loads(path.read_text()) for path in jobs.glob(f"{pattern}/{RECORD}")
    }
    found = [Job(folder, r["job_id"], r["start"]) for folder, r in sorted(records.items())]
    return [job for job in found if job.alive()]


def refuse_dead(job: Job, name: str) -> None:
    """Raise JobError, with the end of its log, when the job is gone."""
    if not job.alive():
        raise JobError(
            f"{name}: its job {job.job_id} ended without a result; {job.folder}:\n{job.log_tail()}"
        )


def process_start(pid: int) -> int | None:
    """When a process started, in clock ticks since boot (Linux); None when it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] == "Z" else int(fields[19])


@contextmanager
def _detached() -> Iterator[None]:
    """Give submitit's local process a session of its own: a flow is ended by killpg."""
    popen = functools.partial(subprocess.Popen, start_new_session=True)
    with mock.patch("submitit.local.local.subprocess.Popen", popen):
        yield


@contextmanager
def _environment(**variables: str) -> Iterator[None]:
    """Environment of the job, set around its start."""
    with mock.patch.dict(os.environ, variables):
        yield
