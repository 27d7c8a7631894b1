"""Cancel what a flow left running."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from slurm import records
from slurm.jobs import Job, unfinished
from slurm.outcome import Phase

SUBMITTING_S, LOOK_S = 5.0, 0.5
"""How long a submission in progress is waited for, and how often it is looked at."""


def cancel_jobs(run_dir: str) -> list[str]:
    """Cancel every job of the run in `run_dir` that may still run; the names of those told so."""
    jobs = Path(run_dir).absolute() / "jobs"
    until = time.monotonic() + SUBMITTING_S
    found = unfinished(jobs)
    while any(a.phase is Phase.SUBMITTING for a in found) and time.monotonic() < until:
        time.sleep(LOOK_S)
        found = unfinished(jobs)
    cancelled = []
    for job in [attempt.job for attempt in found if attempt.job is not None]:
        name = job.folder.name
        records.give_up(job.folder, "CANCELLED", "the flow was cancelled")
        if job.cancel():
            cancelled.append(name)
            continue
        print(f"{name}: job {job.job_id} may go on: {_remedy(job)}", file=sys.stderr)
    return cancelled


def _remedy(job: Job) -> str:
    if job.elsewhere:
        return f"it is on {job.elsewhere} and cannot be ended from here; end it there"
    return "scancel failed or was not answered; repeat it, or start the run again, which does"
