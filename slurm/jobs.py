"""Jobs by their folders: found again, asked what became of them, cancelled."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurm import records
from slurm.errors import JobError
from slurm.outcome import Done, Failed, Outcome, Phase, judge, phase_of
from slurm.watch import Seen, Watch, run_command

LOG = "job.log"


@dataclass(frozen=True)
class Job:
    """One submission. `folder` holds its records and its log."""

    folder: Path
    executor: str
    job_id: str
    start: list[int] | None
    """Of a local job: when each of its processes started, in clock ticks since boot; a pid alone
    may be another's by now."""
    elsewhere: str = ""
    """Of a local job: the other host that it is on, which alone can see it."""

    @classmethod
    def load(cls, folder: Path) -> Job | None:
        """The job of a folder, None where none was submitted.

        To be called once its claimant is gone or has written job.json.
        """
        record = records.read(folder / records.JOB) or _unrecorded(folder)
        if record is None:
            return None
        executor, start, elsewhere = record["executor"], record["start"], ""
        if executor == "local" and record["host"] != socket.gethostname():
            elsewhere = record["host"]
        elif executor == "local" and record["boot"] != records.boot():
            start = None
        return cls(folder, executor, record["job_id"], start, elsewhere)

    def outcome(self, watch: Watch, committed: Callable[[], bool]) -> Outcome:
        """What has become of it, by the latest that is known.

        committed: whether what it is for is there; asked last, as a job commits before it ends.
        """
        starts = records.last_starts(self.folder)
        if any(start["state"] == "FAILED" for start in starts):
            return Done() if committed() else Failed("FAILED", "it failed")
        seen = watch.seen(self.job_id) if self.executor == "slurm" else self._seen()
        # "Pending" from before it started says nothing of a second start.
        answered = seen.answered if seen else time.time()
        started = any(start["started"] < answered for start in starts)
        return judge(committed=committed(), seen=seen, now=time.monotonic(), started=started)

    def phase(self, watch: Watch, *, given_up: bool = False) -> Phase:
        """What it is at this moment to those who would submit another."""
        seen = watch.now(self.job_id) if self.executor == "slurm" else self._seen()
        return phase_of(seen, given_up=given_up, now=time.monotonic())

    def cancel(self) -> bool:
        """End it and everything it started; False where the cluster or its host was not told."""
        if self.executor == "slurm":
            answer = run_command(["scancel", self.job_id])
            return answer is not None and (
                not answer.returncode or "Invalid job id" in answer.stderr  # forgotten: over
            )
        for pid in self._processes():
            with contextlib.suppress(ProcessLookupError):  # it ended since it was seen
                os.killpg(pid, signal.SIGKILL)
        return not self.elsewhere

    def gave_up(self, failed: Failed, name: str) -> JobError:
        """Write down that the job failed; the error to raise, with the end of its log."""
        records.give_up(self.folder, failed.state, failed.reason)
        return JobError(
            f"{name}: job {self.job_id} is {failed.state}: {failed.reason}; "
            f"all of it in {self.folder}\n{self.last_words()}"
        )

    def last_words(self, num_lines: int = 15) -> str:
        """The traceback of its first failing rank, else the end of its log."""
        errors = [n["error"] for n in records.last_starts(self.folder) if n.get("error")]
        if errors:
            return errors[-1].rstrip()
        return log_tail(self.folder, num_lines)

    def _seen(self) -> Seen | None:
        """The state of a job that is not SLURM's, None where it cannot be seen from here."""
        if self.elsewhere:
            return None
        return Seen("RUNNING" if self._processes() else "ENDED")

    def _processes(self) -> list[int]:
        """Of a local job: its processes that are alive, one an element of an array."""
        if self.start is None or self.elsewhere:
            return []
        pairs = zip(map(int, self.job_id.split(",")), self.start, strict=True)
        return [pid for pid, start in pairs if records.process_start(pid) == start]


def _unrecorded(folder: Path) -> dict[str, Any] | None:
    """job.json of a job whose submitter died before it wrote that, from its claim.

    Written down where the job can be seen, so that its row and its shares are not lost.
    """
    claim, ids = records.read(folder / records.CLAIM), records.submitted_ids(folder)
    if claim is None or not ids:
        return None
    found = {**claim, "job_id": ids[0], "start": None, "submitted": claim["claimed"]}
    if claim["executor"] == "local":
        starts = [records.start_of_job_process(int(pid), folder) for pid in ids]
        found |= {"job_id": ",".join(ids), "start": starts}
        if claim["host"] != socket.gethostname():
            return found
    records.write(folder / records.JOB, found)
    return found


def log_files(folder: Path) -> list[Path]:
    """The logs of a job: one, or one a rank or array element."""
    return [*sorted(folder.glob("*.log")), *sorted(folder.glob("*_log.out"))]


def log_tail(folder: Path, num_lines: int) -> str:
    """The last lines of a job's log."""
    logs = log_files(folder)
    lines = [line for log in logs for line in log.read_text(errors="replace").splitlines()]
    return "\n".join(lines[-num_lines:]) or "(it wrote nothing)"


def attempts(jobs: Path, names: str, labels: Mapping[str, Any]) -> list[Path]:
    """Folders of the submissions that were for all of `labels`, oldest first.

    names: pattern of their names; the records of others are not opened, of however many steps.
    A list label stands for the submission when both lists hold a value.
    """
    found = []
    for folder in jobs.glob(names):
        record = records.read(folder / records.CLAIM) or records.read(folder / records.JOB)
        if record is not None and all(_holds(record.get(n), v) for n, v in labels.items()):
            found.append((record["claimed"], folder))
    return [folder for _, folder in sorted(found)]


def _holds(recorded: Any, value: Any) -> bool:
    if isinstance(recorded, list):
        return not set(recorded).isdisjoint(value)
    return recorded == value


@dataclass(frozen=True)
class Attempt:
    """A submission as it was when it was looked at."""

    folder: Path
    claim: Mapping[str, Any]
    """Who claimed it, what for."""
    given_up: str
    """The state in which it was given up, empty where it was not."""
    phase: Phase
    job: Job | None


def look(folder: Path, watch: Watch) -> Attempt:
    """What has become of a claimed folder and the job in it."""
    claim, outcome = records.read(folder / records.CLAIM), records.read(folder / records.OUTCOME)
    claimed = claim is not None and records.claimant_alive(folder, claim)
    record = records.read(folder / records.JOB)  # after the claimant: what it left is seen
    given_up = outcome["state"] if outcome is not None else _failed(folder)
    known = folder, claim or record or {}, given_up
    if claimed and record is None and outcome is None:
        return Attempt(*known, Phase.SUBMITTING, None)
    settled = record is not None and "state" in record
    job = None if settled else Job.load(folder)
    if job is None:
        return Attempt(*known, Phase.OVER, None)
    return Attempt(*known, job.phase(watch, given_up=bool(given_up)), job)


def _failed(folder: Path) -> str:
    states = [start["state"] for start in records.last_starts(folder)]
    return "FAILED" if "FAILED" in states else ""


def unfinished(jobs: Path) -> list[Attempt]:
    """The submissions below `jobs` that are not over."""
    watch = Watch()
    found = [look(folder, watch) for folder in sorted(jobs.glob("[0-9]*"))]
    return [attempt for attempt in found if attempt.phase is not Phase.OVER]
