"""The job of a stage, waited for until its manifest is there, or it will not come."""

from __future__ import annotations

import sys
import time
from typing import NoReturn

from relax.stages.keys import key_parts
from relax.stages.rounds import row_of
from relax.store import Manifest
from relax.store.manifest import digest
from relax.store.parts import finished
from slurm import records
from slurm.jobs import Job, log_files
from slurm.log import LogReader
from slurm.outcome import Failed, Outcome, Queued, Requeued
from tasks.placing import SHARES, dealt
from tasks.session import Session, Stopped

LOOK_S, SOON_S, LONGEST_LOOK_S = 0.02, 0.15, 2.0
"""How often the manifest is looked for: at first, within seconds, and after half an hour."""
ASK_S = 0.5
"""How often the job's own records are read while waiting."""


def finished_shards(session: Session, step: int, stage: str) -> set[int]:
    """The shards of an array's stage that are there already."""
    if not dealt(session.config, stage):
        return set()
    key = digest(key_parts(session.run, step, row_of(session.run, step, stage)))
    return finished(session.run.root, step, stage, key)


def wait(session: Session, step: int, stage: str, job: Job) -> Manifest | None:
    """The manifest of a stage that `job` makes; JobError when the job will not make it.

    None when the job was stopped, or is an array that made some of its shards: the rest is to be
    submitted.
    """
    began, asked, told = time.monotonic(), 0.0, set[Outcome]()
    log = LogReader(lambda: log_files(job.folder))
    while True:
        manifest = session.run.manifest(step, stage)
        for line in log.lines():
            session.relay(line)
        if manifest is not None:
            session.served(job)
            return manifest
        if session.stopping.is_set():
            _stop(session, job)
        now = time.monotonic()
        if now - asked >= ASK_S:
            asked = now
            outcome = _checked(session, step, stage, job)
            if isinstance(outcome, Failed):
                return None
            _tell(f"{step:06d}-{stage}", job, outcome, told)
        _pause(session, interval(now - began))


def interval(waited_s: float) -> float:
    """Seconds to the next look: what took hours is noticed a thousandth of that late, no more."""
    soon = min(LOOK_S + waited_s / 50, SOON_S)
    return max(soon, min(waited_s / 1000, LONGEST_LOOK_S))


def _pause(session: Session, seconds: float) -> None:
    """Sleep, less long where the user asks to stop."""
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0 and not session.stopping.is_set():
        time.sleep(min(left, SOON_S))


def _checked(session: Session, step: int, stage: str, job: Job) -> Outcome:
    """What has become of the job; raises its error once neither it nor a manifest is there.

    Failed: the rest is to be submitted, of what it left when it was asked to stop, of an array
    whose elements died while others made what they were for, or of a job that was submitted ahead
    and never began.
    """
    name = f"{step:06d}-{stage}"
    outcome = job.outcome(session.watch, lambda: session.run.manifest(step, stage) is not None)
    if not isinstance(outcome, Failed):
        return outcome
    session.watch.forget(job.job_id)
    states = {start["state"] for start in records.last_starts(job.folder)}
    if "STOPPED" in states and outcome.state in ("COMPLETED", "ENDED"):
        outcome = Failed("STOPPED", "it was asked to stop, and nobody queued it again")
    error = job.gave_up(outcome, name)
    session.cancel_ahead()
    if outcome.state == "STOPPED":
        print(f"{name}: job {job.job_id} was stopped: what it left goes out again", file=sys.stderr)
    elif not states and (records.read(job.folder / records.JOB) or {}).get("after"):
        # What it waited for may have done its part all the same, before it ended badly.
        print(f"{name}: {outcome.reason}; it goes out again in its turn", file=sys.stderr)
    elif "FAILED" not in states and _made_shards(session, step, stage, job):
        print(
            f"{name}: elements of job {job.job_id} died: their shards go out again", file=sys.stderr
        )
    else:
        raise error
    return outcome


def _made_shards(session: Session, step: int, stage: str, job: Job) -> bool:
    """Whether an array that is over made some of its shards."""
    asked = (records.read(job.folder / records.JOB) or {}).get(SHARES, [])
    return bool(finished_shards(session, step, stage) & {n for share in asked for n in share})


def _tell(name: str, job: Job, outcome: Outcome, told: set[Outcome]) -> None:
    """Say, once each, why the job does not run; `told`: what was said of it."""
    if not isinstance(outcome, Queued | Requeued) or outcome in told | {Queued()}:
        return
    told.add(outcome)
    state = "is queued" if isinstance(outcome, Queued) else "was requeued"
    reason = f" ({outcome.reason})" if outcome.reason else ""
    print(f"{name}: its job {job.job_id} {state}{reason}; waiting", file=sys.stderr)


def _stop(session: Session, job: Job) -> NoReturn:
    """The user asked to stop: cancel the job, unless detached, and leave."""
    if session.config.slurm.detach:
        raise Stopped(f"stopped; job {job.job_id} goes on, run the same command to wait for it")
    records.give_up(job.folder, "CANCELLED", "the flow was stopped")
    session.cancel_ahead()
    if not job.cancel():
        raise Stopped(
            f"stopped, but job {job.job_id} may go on: scancel failed or was not answered; "
            "run the same command to cancel it and continue"
        )
    raise Stopped(f"stopped, job {job.job_id} cancelled; run the same command to continue")
