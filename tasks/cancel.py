"""Cancel what a flow left running."""

from __future__ import annotations

from pathlib import Path

from slurm import records
from slurm.jobs import living


def cancel_jobs(run_dir: str) -> list[str]:
    """Cancel every living job of the run in `run_dir`; their names."""
    jobs = living(Path(run_dir).absolute() / "jobs")
    for job in jobs:
        job.cancel()
        records.give_up(job.folder, "CANCELLED", "the flow was cancelled")
    return [job.folder.name for job in jobs]
