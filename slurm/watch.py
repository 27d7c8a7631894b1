"""What the cluster says about jobs: one squeue call for all of them, asked ever more rarely."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

FIRST_POLL_S, LONGEST_POLL_S = 1.0, 30.0
COMMAND_TIMEOUT_S = 20.0
UNKNOWN = "UNKNOWN"

Run = Callable[[list[str]], "subprocess.CompletedProcess[str] | None"]


@dataclass(frozen=True)
class Seen:
    """A job's state in SLURM's words (UNKNOWN: neither squeue nor sacct has it)."""

    state: str
    reason: str = ""
    exit_code: str = ""
    since: float = 0.0
    """When this state was seen first, by the watcher's clock."""
    answered: float = field(default=0.0, compare=False)
    """When this answer came, in seconds since the epoch."""


def run_command(words: list[str]) -> subprocess.CompletedProcess[str] | None:
    """A client command's result; None when it is absent or the cluster does not answer."""
    try:
        return subprocess.run(
            words, capture_output=True, text=True, check=False, timeout=COMMAND_TIMEOUT_S
        )
    except (subprocess.TimeoutExpired, FileNotFoundError):
        return None


def query(job_ids: Sequence[str], run: Run = run_command) -> dict[str, Seen] | None:
    """State of each job; None when the cluster does not answer.

    squeue knows running jobs and for some minutes finished ones, without any database; sacct is
    asked for the rest and may be missing.
    """
    answer = run(["squeue", "-h", "-r", "-t", "all", "-o", "%i|%T|%r", "-j", ",".join(job_ids)])
    if answer is None or (answer.returncode and "Invalid job id" not in answer.stderr):
        return None
    seen = {}
    for line in answer.stdout.splitlines():
        job_id, state, reason = line.strip().split("|", 2)
        seen[job_id] = Seen(state, "" if reason == "None" else reason)
    missing = [job_id for job_id in job_ids if not _elements(job_id, seen)]
    if missing:
        seen |= _from_accounting(missing, run)
    return {job_id: _whole(_elements(job_id, seen)) for job_id in job_ids}


def _from_accounting(job_ids: list[str], run: Run) -> dict[str, Seen]:
    fields = "JobID,State,ExitCode"
    answer = run(["sacct", "-n", "-P", "-X", "-o", fields, "-j", ",".join(job_ids)])
    if answer is None or answer.returncode:
        return {}
    seen = {}
    for line in answer.stdout.splitlines():
        job_id, state, exit_code = line.split("|")
        if state:
            seen[job_id] = Seen(plain(state), exit_code=exit_code)
    return seen


def plain(state: str) -> str:
    """`CANCELLED by 0`, `CANCELLED+` -> CANCELLED."""
    return state.split(maxsplit=1)[0].rstrip("+")


def _elements(job_id: str, seen: dict[str, Seen]) -> list[Seen]:
    """The job itself, or the elements of the array that it is."""
    return [s for name, s in seen.items() if name == job_id or name.startswith(f"{job_id}_")]


FIRST = ("RUNNING", "COMPLETING", "CONFIGURING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT")
FIRST += ("RESIZING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD")
FIRST += ("PENDING", "NODE_FAIL", "PREEMPTED", "BOOT_FAIL", "REVOKED")  # these may run again
FIRST += ("FAILED", "OUT_OF_MEMORY", "TIMEOUT", "CANCELLED")


def _whole(elements: list[Seen]) -> Seen:
    """What stands for an array: one that may still run, else the worst; a lone job for itself."""
    if not elements:
        return Seen(UNKNOWN)
    rank = {state: place for place, state in enumerate(FIRST)}
    return min(elements, key=lambda seen: rank.get(seen.state, len(rank)))


class Watch:
    """Answers for all waiting stages of a flow; each of their calls may be the one that asks."""

    def __init__(self, ask: Callable[[Sequence[str]], dict[str, Seen] | None] = query) -> None:
        self._ask = ask
        self._lock = threading.Lock()
        self._seen: dict[str, Seen] = {}
        self._watched: set[str] = set()
        self._next, self._interval = 0.0, FIRST_POLL_S

    def seen(self, job_id: str) -> Seen | None:
        """The latest answer about a job, None while there is none. Rarely waits for squeue."""
        with self._lock:
            if job_id not in self._watched:
                self._watched.add(job_id)
                self._interval = FIRST_POLL_S
                self._next = min(self._next, time.monotonic() + FIRST_POLL_S)
            if time.monotonic() >= self._next:
                self._poll()
            return self._seen.get(job_id)

    def now(self, job_id: str) -> Seen | None:
        """The cluster's answer about one job at this moment; None when there is none."""
        with self._lock:
            answer = self._ask([job_id])
            if answer is not None:
                self._take(answer)
            return None if answer is None else self._seen[job_id]

    def forget(self, job_id: str) -> None:
        """Stop asking about a job."""
        with self._lock:
            self._watched.discard(job_id)
            self._seen.pop(job_id, None)

    def _poll(self) -> None:
        answer = self._ask(sorted(self._watched))
        if answer is not None:
            self._take(answer)
        self._next = time.monotonic() + self._interval
        self._interval = min(self._interval * 1.5, LONGEST_POLL_S)

    def _take(self, answer: dict[str, Seen]) -> None:
        now = time.monotonic()
        for job_id, seen in answer.items():
            before = self._seen.get(job_id)
            same = before is not None and before.state == seen.state
            since = before.since if same and before else now
            self._seen[job_id] = replace(seen, since=since, answered=time.time())
