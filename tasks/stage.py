"""Where a stage runs: already done? return it : run or submit, wait, check, return."""

from __future__ import annotations

from collections.abc import Callable

from relax.stages.keys import done
from relax.store import Manifest
from slurm import entry
from tasks.claims import obtain, submit_ahead
from tasks.jobs import wait
from tasks.session import Session

PERFORM = "relax.stages.perform:perform"


def perform(session: Session, step: int, stage: str) -> tuple[Manifest, bool]:
    """The committed manifest of a stage, and whether it was there already."""
    session.before_stage()
    manifest = done(session.run, step, stage)
    reused = manifest is not None and (step, stage) not in session.making
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
    """In a job, with the stages beside it that share its allocation.

    A job that an earlier flow left running is waited for instead of submitting another. What a
    stopped job left, or an array whose elements died, is submitted again: of an array as long as
    each attempt made shards.
    """
    while (working := obtain(session, step, stage)) is not None:
        submit_ahead(session, step, stage, working)
        if wait(session, step, stage, working) is not None:
            break
    manifest = done(session.run, step, stage)  # an earlier flow's job may have had other settings
    assert manifest is not None
    return manifest


PLACEMENTS: dict[str, Callable[[Session, int, str], Manifest]] = {"inline": inline, "job": job}
