"""One Prefect task per stage: already done? return it : run or submit, wait, check, return."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from relax.stages.keys import done
from relax.store import Manifest
from slurm import entry, submit
from tasks.session import Session, Stopped

PERFORM = "relax.stages.perform:perform"
POLL_S = 0.05


def perform(session: Session, step: int, stage: str) -> tuple[Manifest, bool]:
    """The committed manifest of a stage, and whether it was there already."""
    session.before_stage()
    manifest = done(session.run, step, stage)
    reused = manifest is not None
    if manifest is None:
        manifest = PLACEMENTS[session.config.placement_of(stage)](session, step, stage)
    session.report(session.run.root, manifest, reused)
    return manifest, reused


def inline(session: Session, step: int, stage: str) -> Manifest:
    """In this process, which keeps model, optimizer and engine warm between stages."""
    if session.warm is None:
        session.warm = entry.run("relax.stages.perform:Warm", {})
    entry.run(
        PERFORM,
        {
            "run_dir": str(session.run.root),
            "step": step,
            "name": stage,
            "attempt": session.attempt(),
            "warm": session.warm,
        },
    )
    return session.run.committed(step, stage)


def job(session: Session, step: int, stage: str) -> Manifest:
    """In a job of its own; one that an earlier flow left running is waited for instead."""
    name = f"{step:06d}-{stage}"
    running = submit.find(session.jobs, name)
    if running is None:
        running = _submit(session, step, stage, name)
    else:
        print(f"{name}: its job {running.job_id} is running; waiting for it", file=sys.stderr)
    while True:
        manifest = done(session.run, step, stage)
        if manifest is not None:
            return manifest
        alive = running.alive()
        if not alive and done(session.run, step, stage) is None:
            submit.refuse_dead(running, name)
        if session.stopping.is_set():
            running.cancel()
            raise Stopped(f"stopped, job of {name} cancelled; run the same command to continue")
        time.sleep(POLL_S)


def _submit(session: Session, step: int, stage: str, name: str) -> submit.Job:
    folder = submit.claim(session.jobs, name)
    attempt = f"job-{folder.name.rsplit('-', 1)[1]}"
    arguments = {
        "run_dir": str(session.run.root),
        "step": step,
        "name": stage,
        "attempt": attempt,
    }
    return submit.submit(
        folder,
        PERFORM,
        arguments,
        timeout_min=session.config.placement.job_timeout_min,
        code=session.code,
    )


PLACEMENTS: dict[str, Callable[[Session, int, str], Manifest]] = {"inline": inline, "job": job}
