"""Prefect's cancellation runs in another process, which knows the run's directory and no more."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from relax.config import Config
from relax.flags import load_config
from slurm import records
from slurm.jobs import Job


def cancel_jobs(flow: Any, flow_run: Any, state: Any) -> None:
    """Hook of a cancelled flow run: end its jobs, unless the run is detached."""
    del flow, state
    given = flow_run.parameters
    cancel_all(load_config(given.get("config") or None, given.get("overrides")))


def cancel_all(config: Config) -> list[Job]:
    """Cancel every job of the run that has not ended; those it asked to end."""
    if config.slurm.detach:
        return []
    cancelled = []
    for folder in sorted((Path(config.run.run_dir) / "jobs").glob("[0-9]*")):
        row, job = records.accounting(folder), Job.load(folder)
        if job is not None and (row is None or row["state"] in ("PENDING", "RUNNING")):
            job.cancel()
            cancelled.append(job)
    return cancelled
