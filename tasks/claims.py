"""The job of a stage, found where an earlier flow left one, else claimed and submitted.

A claim is a directory that exactly one process can make. Nobody claims the next attempt before
the cluster says that the one before is over.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from relax.store import disk
from slurm import records
from slurm.errors import JobError
from slurm.jobs import Attempt, Job, attempts, look
from slurm.outcome import Phase
from slurm.submit import submit
from tasks.jobs import ASK_S, finished_shards
from tasks.placing import dealt, gang, labels, next_gang, order_of
from tasks.session import Session


def obtain(session: Session, step: int, stage: str) -> Job | None:
    """The one living job for a stage: an earlier one, or a new one; None once it is committed."""
    stages, told, cancelled = _gang(session, step, stage), "", set[str]()
    while True:
        number = _following(session, step, stages[0])  # before the look: see _claim_and_submit
        found = _looked(session, step, stages)
        living = next((a.job for a in found if _makes(a, stage)), None)
        if session.run.manifest(step, stage) is not None:
            return living
        if living is not None:
            if (step, stage) not in session.making:
                _tell_found(f"{step:06d}-{stage}", living)
            return living
        pending = [a for a in found if a.phase is not Phase.OVER]
        if not pending:
            job = _claim_and_submit(session, step, stages, number, before=found)
            if job is not None:
                return job
        elif (awaited := _awaited(pending[0])) != told:
            print(f"{step:06d}-{stage}: waiting for {awaited}", file=sys.stderr)
            told = awaited
        _cancel_again(pending, cancelled)
        session.stopping.wait(ASK_S)
        session.stop_if_asked()


def submit_ahead(session: Session, step: int, stage: str, job: Job) -> None:
    """Where the settings say so: submit what follows `job` in its step, to wait for its end.

    A claim and a job like any other, found when its turn comes. Where `job` does not end well the
    cluster takes it out of the queue, and the next attempt is made in its turn.
    """
    session.ahead = None
    stages = next_gang(session.config, session.plan.get(step, []), stage)
    if not stages or not session.config.slurm.submit_ahead or job.executor != "slurm":
        return
    number = _following(session, step, stages[0])
    found = _looked(session, step, stages)
    waiting = [attempt for attempt in found if attempt.phase is not Phase.OVER]
    session.ahead = next((a.job for a in waiting if a.claim.get("after") == job.job_id), None)
    if waiting or any(session.run.manifest(step, s) is not None for s in stages):
        return
    try:
        ahead = _claim_and_submit(session, step, stages, number, before=found, after=job.job_id)
    except JobError as error:
        print(f"{error}\n{step:06d}-{stages[0]}: submitted in its turn", file=sys.stderr)
        return
    if ahead is not None:
        session.ahead = ahead
        session.served(ahead)  # it may be through before its turn comes


def _tell_found(name: str, job: Job) -> None:
    print(f"{name}: its job {job.job_id} is running; waiting for it", file=sys.stderr)


def _gang(session: Session, step: int, stage: str) -> tuple[str, ...]:
    return gang(session.config, session.plan.get(step, []), stage)


def _looked(session: Session, step: int, stages: Sequence[str]) -> list[Attempt]:
    """All attempts at any of `stages`, oldest first; of all at once, as each has its grace."""
    return [look(folder, session.watch) for folder in _attempts(session, step, stages)]


def _attempts(session: Session, step: int, stages: Sequence[str]) -> list[Path]:
    return attempts(session.jobs, f"{step:06d}-*", labels(step, stages))


def _makes(attempt: Attempt, stage: str) -> bool:
    return attempt.phase is Phase.LIVING and stage in attempt.claim["stages"]


def _awaited(attempt: Attempt) -> str:
    """What must have happened before another attempt is made."""
    if attempt.job is None:
        return f"process {attempt.claim['pid']} on {attempt.claim['host']} to submit it"
    job = f"job {attempt.job.job_id}"
    if attempt.job.elsewhere:
        unseen = f"{job} on {attempt.job.elsewhere}, which cannot be seen from here"
        return f"{unseen}; if it is over, remove {attempt.folder}"
    return {
        Phase.LIVING: f"{job}, which makes {', '.join(attempt.claim['stages'])}",
        Phase.DOUBTFUL: f"the cluster to say whether {job} is over",
        Phase.ENDING: f"{job}, which is {attempt.given_up}, to leave its nodes",
    }[attempt.phase]


def _cancel_again(pending: Sequence[Attempt], cancelled: set[str]) -> None:
    """End what was cancelled while the cluster did not answer; `cancelled`: who was told since."""
    for attempt in pending:
        job, again = attempt.job, attempt.phase is Phase.ENDING and attempt.given_up == "CANCELLED"
        if job is not None and again and job.job_id not in cancelled and job.cancel():
            cancelled.add(job.job_id)


def _following(session: Session, step: int, stage: str) -> int:
    """The number of the next attempt that begins with `stage`, after all that are there now."""
    folders = session.jobs.glob(f"{step:06d}-{stage}-[0-9]*")
    return max((int(folder.name.rsplit("-", 1)[1]) for folder in folders), default=0) + 1


def _claim_and_submit(
    session: Session,
    step: int,
    stages: Sequence[str],
    number: int,
    *,
    before: Sequence[Attempt],
    after: str = "",
) -> Job | None:
    """Submit attempt `number`, unless another process is faster (None).

    The number is one that followed all attempts before they were looked at and found to be over:
    an attempt that came after that look has the number, so nobody steps over it.
    """
    folder = session.jobs / f"{step:06d}-{stages[0]}-{number}"
    order = order_of(
        session.config,
        session.run.root,
        code=session.code,
        step=step,
        stages=stages,
        attempt=f"job-{number}",
        shares=dealt(session.config, stages[0], finished_shards(session, step, stages[0])),
        after=after,
    )
    made = {(step, s) for s in stages if session.run.manifest(step, s) is None}
    session.lease.check()
    disk.make_dir(session.jobs)
    if not records.claim(folder, order.facts):
        return None
    try:
        if _overtaken(session, step, stages, folder, {attempt.folder for attempt in before}):
            records.give_up(folder, "YIELDED", "another flow submits one of its stages")
            return None
        job = submit(folder, order)
    except BaseException as error:
        _abandon(folder, error)
        raise
    session.making |= made
    return job


def _overtaken(
    session: Session, step: int, stages: Sequence[str], mine: Path, before: set[Path]
) -> bool:
    """Whether another flow makes one of `stages` in a job of other stages, so of another name.

    Of two that claim at the same time each sees the other, or came first. Who sees an older
    claim yields to it; who sees a younger one lets its claimant see this one and decide.
    """
    while True:
        folders = _attempts(session, step, stages)
        older = folders[: folders.index(mine)]
        others = [look(f, session.watch) for f in folders if f != mine and f not in before]
        others = [attempt for attempt in others if attempt.phase is not Phase.OVER]
        if not others:
            return False
        if any(a.folder in older or a.phase is not Phase.SUBMITTING for a in others):
            return True
        session.stopping.wait(ASK_S)
        session.stop_if_asked()


def _abandon(folder: Path, error: BaseException) -> None:
    """After a submission that broke off: end what is out already, and let others try."""
    job = Job.load(folder)
    if job is not None:
        job.cancel()
    state = "REFUSED" if isinstance(error, JobError) else "FAILED"
    records.give_up(folder, state, str(error) or type(error).__name__)
