"""What has become of a job: the manifest decides success, SLURM only whether to keep waiting."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from slurm.watch import UNKNOWN, Seen


@dataclass(frozen=True)
class Done:
    """What the job was for is committed, whoever did it."""


@dataclass(frozen=True)
class Queued:
    """Not started yet; `reason` in SLURM's words."""

    reason: str = ""


@dataclass(frozen=True)
class Running:
    """On its nodes, or just ending."""


@dataclass(frozen=True)
class Requeued:
    """Was stopped by the cluster and will start again under the same id."""

    reason: str = ""


@dataclass(frozen=True)
class Failed:
    """Will not do what it was for."""

    state: str
    reason: str


Outcome = Done | Queued | Running | Requeued | Failed


class Phase(Enum):
    """What a submission is to those who would make another one for the same."""

    SUBMITTING = "its claimant may yet submit it"
    LIVING = "its job may give what it is for"
    DOUBTFUL = "whether its job is over cannot be told yet"
    ENDING = "its job was given up and may still be on its nodes"
    OVER = "nothing of it runs, or will again"


WAITING = {"PENDING", "CONFIGURING", "RESV_DEL_HOLD"}
ACTIVE = {"RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT", "RESIZING"}
AGAIN = {"REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT"}
PERHAPS_AGAIN = {"NODE_FAIL", "PREEMPTED", "BOOT_FAIL", "REVOKED"}
ENDED = {
    "COMPLETED": "it ended without a result",
    "ENDED": "it ended without a result",
    "FAILED": "it failed",
    "TIMEOUT": "it reached its time limit; raise minutes of its allocation",
    "DEADLINE": "it reached its deadline",
    "OUT_OF_MEMORY": "it ran out of memory; raise mem_gb of its allocation",
    "CANCELLED": "it was cancelled",
    "LAUNCH_FAILED": "its nodes could not start it",
    "RECONFIG_FAIL": "its nodes could not be set up",
}
REQUEUE_GRACE_S = 20.0
"""A requeued job shows as NODE_FAIL for up to 5 s before it is pending again (seen on 22.05)."""
COMMIT_GRACE_S = 3.0
"""What a job committed last may be seen after its end is."""
UNKNOWN_GRACE_S = 60.0
"""A fresh job may be in squeue and not yet in sacct, or in neither for a moment."""


def judge(*, committed: bool, seen: Seen | None, now: float, started: bool) -> Outcome:
    """What a job's manifest and its state in SLURM mean together.

    seen: the cluster's last answer, None where there was none; now: the clock of seen.since;
    started: whether the job has run before, on any node.
    """
    if committed:
        return Done()
    if seen is None:
        return Running() if started else Queued()
    if seen.state in WAITING:
        return _waiting(seen, started)
    if seen.state in ACTIVE:
        return Running()
    if seen.state in AGAIN:
        return Requeued(seen.reason)
    return _ending(seen, now - seen.since, started)


def phase_of(seen: Seen | None, *, given_up: bool, now: float) -> Phase:
    """What a job is by its state, once it was submitted; the arguments are those of `judge`.

    given_up: whether nobody waits for it any more; it is no fresh job, so unknown means forgotten.
    """
    if seen is None:
        return Phase.DOUBTFUL
    verdict = judge(committed=False, seen=seen, now=now, started=True)
    if seen.state in ENDED or isinstance(verdict, Failed) or (given_up and seen.state == UNKNOWN):
        return Phase.OVER
    if seen.state not in WAITING | ACTIVE | AGAIN:
        return Phase.DOUBTFUL
    return Phase.ENDING if given_up else Phase.LIVING


def _ending(seen: Seen, age_s: float, started: bool) -> Outcome:
    """A state that is final once it has lasted for its grace."""
    if seen.state in PERHAPS_AGAIN:
        if age_s < REQUEUE_GRACE_S:
            return Requeued(seen.state)
        return Failed(seen.state, "its nodes were lost or taken, and it was not requeued")
    if seen.state == UNKNOWN:
        if age_s < UNKNOWN_GRACE_S:
            return Running() if started else Queued()
        return Failed(UNKNOWN, "neither squeue nor sacct knows it any more")
    if age_s < COMMIT_GRACE_S:
        return Running()
    words = ENDED.get(seen.state, "it is over")
    exit_code = f" (exit {seen.exit_code})" if seen.exit_code not in ("", "0:0") else ""
    return Failed(seen.state, f"{words}{exit_code}")


def _waiting(seen: Seen, started: bool) -> Outcome:
    if seen.reason == "DependencyNeverSatisfied":
        return Failed(seen.state, "it waits for a job that failed")
    return Requeued(seen.reason) if started else Queued(seen.reason)
