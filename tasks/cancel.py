"""Cancel what a flow left running."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from slurm import records
from slurm.jobs import Attempt, unfinished
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
    faults = {attempt.folder.name: _fault(attempt) for attempt in found}
    for name, fault in faults.items():
        if fault:
            print(f"{name}: {fault}", file=sys.stderr)
    return [name for name, fault in faults.items() if not fault]


def _fault(attempt: Attempt) -> str:
    """Cancel the job of one attempt; what may have remained of it, and what to do."""
    job, row = attempt.job, records.accounting(attempt.folder)
    if job is None:
        who = f"process {attempt.claim['pid']} on {attempt.claim['host']}"
        return f"{who} may yet submit its job; end that process, or cancel again"
    if row is None or row["state"] != "COMPLETED":  # of one that did its work only processes remain
        records.give_up(job.folder, "CANCELLED", "the flow was cancelled")
    if job.cancel():
        return ""
    if job.elsewhere:
        return f"job {job.job_id} may go on: it is on {job.elsewhere}; end it there"
    return (
        f"job {job.job_id} may go on: scancel failed or was not answered; repeat it, or "
        "start the run again, which does"
    )
