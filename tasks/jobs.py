"""The job of a stage: found where an earlier flow left one, else claimed and submitted; waited for.

A claim is a directory that exactly one process can make. Nobody claims the next attempt before
the cluster says that the one before is over.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from relax.stages.keys import key_parts
from relax.stages.rounds import row_of
from relax.store import Manifest, disk
from relax.store.commit import step_dir
from relax.store.manifest import digest
from relax.store.parts import finished
from slurm import records
from slurm.errors import JobError
from slurm.jobs import Job, attempts, log_files
from slurm.log import LogReader
from slurm.outcome import Failed, Outcome, Requeued, Running
from slurm.submit import submit
from tasks.placing import SHARES, dealt, gang, labels, order_of
from tasks.session import Session, Stopped

LOOK_S, LONGEST_LOOK_S = 0.02, 0.15
"""How often the manifest is looked for: at first, and after a while."""
ASK_S = 0.5
"""How often the job's own records are read while waiting."""


def obtain(session: Session, step: int, stage: str) -> Job | None:
    """The one living job for a stage: an earlier one, or a new one; None once it is committed."""
    told = False
    while True:
        following = _following(session, step, stage)  # before the look: see _claim_and_submit
        job, pending = _living(session, step, stage)
        if session.run.manifest(step, stage) is not None:
            return job
        if job is not None:
            name = f"{step:06d}-{stage}"
            print(f"{name}: its job {job.job_id} is running; waiting for it", file=sys.stderr)
            return job
        if not pending:
            job = _claim_and_submit(session, step, stage, following)
            if job is not None:
                return job
        elif not told:
            print(f"{step:06d}-{stage}: waiting for {pending}", file=sys.stderr)
            told = True
        stop_if_asked(session, None)
        time.sleep(LONGEST_LOOK_S)


def _living(session: Session, step: int, stage: str) -> tuple[Job | None, str]:
    """A job that may still give the stage; else what must be over before another is submitted."""
    for folder in attempts(session.jobs, {"step": step, "stages": stage}):
        claim = records.read(folder / records.CLAIM)
        claimed = claim is not None and records.claimant_alive(claim)
        job = Job.load(folder)  # after the claimant: what it wrote before it left is seen
        if job is None:
            if claim is not None and claimed:
                return None, f"process {claim['pid']} on {claim['host']} to submit it"
            continue
        ended = records.accounting(folder)
        if ended is not None and ended["state"] == "COMPLETED" and _settled(folder):
            continue
        alive = job.alive(session.watch)
        if alive is None:
            return None, f"the cluster to answer about job {job.job_id}"
        if alive and not _gave_up(folder):
            return job, ""
        if alive:
            return None, f"job {job.job_id}, which failed, to leave its nodes"
    return None, ""


def _settled(folder: Path) -> bool:
    return not (folder / records.CLAIM).exists()


def _gave_up(folder: Path) -> bool:
    failed = [node for node in records.node_records(folder) if node["state"] == "FAILED"]
    return bool(failed) or (folder / records.OUTCOME).exists()


def _following(session: Session, step: int, stage: str) -> int:
    """The number of the next attempt at the stage, after all that are there now."""
    name = f"{step:06d}-{_gang(session, step, stage)[0]}"
    numbers = [int(f.name.rsplit("-", 1)[1]) for f in session.jobs.glob(f"{name}-[0-9]*")]
    return max(numbers, default=0) + 1


def _gang(session: Session, step: int, stage: str) -> tuple[str, ...]:
    return gang(session.config, session.plan.get(step, []), stage)


def _claim_and_submit(session: Session, step: int, stage: str, number: int) -> Job | None:
    """Submit attempt `number`, unless another process claims it first (None).

    The number is one that followed all attempts before they were looked at and found to be over:
    an attempt that came after that look has the number, so nobody steps over it.
    """
    stages = _gang(session, step, stage)
    folder = session.jobs / f"{step:06d}-{stages[0]}-{number}"
    session.lease.check()
    disk.make_dir(session.jobs)
    executor = session.config.placement.executor
    if not records.claim(folder, {**labels(step, stages), "executor": executor}):
        return None
    order = order_of(
        session.config,
        session.run.root,
        code=session.code,
        step=step,
        stages=stages,
        attempt=f"job-{number}",
        shares=dealt(session.config, stage, _finished(session, step, stage)),
    )
    made = {(step, s) for s in stages if session.run.manifest(step, s) is None}
    try:
        job = submit(folder, order)
    except JobError as error:
        records.give_up(folder, "REFUSED", str(error))
        raise
    session.making |= made
    return job


def _finished(session: Session, step: int, stage: str) -> set[int]:
    """The shards of an array's stage that are there already."""
    if not dealt(session.config, stage):
        return set()
    key = digest(key_parts(session.run, step, row_of(session.run, step, stage)))
    return finished(session.run.root, step, stage, key)


def wait(session: Session, step: int, stage: str, job: Job) -> Manifest | None:
    """The manifest of a stage that `job` makes; JobError when the job will not make it.

    None when the job is an array that made some of its shards: the rest is to be submitted.
    """
    began, asked, told = time.monotonic(), 0.0, False
    log = LogReader(lambda: log_files(job.folder))
    while True:
        manifest = session.run.manifest(step, stage)
        for line in log.lines():
            session.relay(line)
        if manifest is not None:
            session.served(job)
            return manifest
        stop_if_asked(session, job)
        now = time.monotonic()
        if now - asked >= ASK_S:
            asked = now
            outcome = _checked(session, step, stage, job)
            if isinstance(outcome, Failed):
                return None
            told = _tell(f"{step:06d}-{stage}", outcome, told)
        time.sleep(min(LOOK_S + (now - began) / 50, LONGEST_LOOK_S))


def _checked(session: Session, step: int, stage: str, job: Job) -> Outcome:
    """What has become of the job; raises its error once neither it nor a manifest is there.

    Failed: of an array, elements died, and others made what they were for.
    """
    name, outcome = f"{step:06d}-{stage}", job.outcome(session.watch, committed=False)
    if not isinstance(outcome, Failed):
        return outcome
    if disk.listed(step_dir(session.run.root, step) / stage):
        return Running()
    session.watch.forget(job.job_id)
    error = job.gave_up(outcome, name)
    if not _has_more(session, step, stage, job):
        raise error
    print(f"{name}: elements of job {job.job_id} died: their shards go out again", file=sys.stderr)
    return outcome


def _has_more(session: Session, step: int, stage: str, job: Job) -> bool:
    """Whether an array that is over made shards, and none of its elements raised an error."""
    if any(node["state"] == "FAILED" for node in records.node_records(job.folder)):
        return False
    asked = (records.read(job.folder / records.JOB) or {}).get(SHARES, [])
    return bool(_finished(session, step, stage) & {n for share in asked for n in share})


def _tell(name: str, outcome: Outcome, told: bool) -> bool:
    if isinstance(outcome, Requeued) and not told:
        print(f"{name}: its job was requeued ({outcome.reason}); waiting", file=sys.stderr)
    return told or isinstance(outcome, Requeued)


def stop_if_asked(session: Session, job: Job | None) -> None:
    """When the user asked to stop: cancel the job, unless detached, and leave."""
    if not session.stopping.is_set():
        return
    if job is None:
        raise Stopped(f"stopped; run the same command again to continue {session.run.root}")
    if session.config.slurm.detach:
        raise Stopped(f"stopped; job {job.job_id} goes on, run the same command to wait for it")
    job.cancel()
    cancelled = Failed("CANCELLED", "the flow was stopped")
    job.gave_up(cancelled, job.folder.name)
    raise Stopped(f"stopped, job {job.job_id} cancelled; run the same command to continue")
