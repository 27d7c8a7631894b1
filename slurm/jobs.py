"""Jobs by their folders: found again, asked what became of them, cancelled."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurm import records
from slurm.errors import JobError
from slurm.outcome import ENDED, Done, Failed, Outcome, Running, judge
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

    @classmethod
    def load(cls, folder: Path) -> Job | None:
        """The job of a folder, None where none was submitted."""
        record = records.read(folder / records.JOB)
        if record is not None:
            return cls(folder, record["executor"], record["job_id"], record["start"])
        ids = records.submitted_ids(folder)
        if not ids:
            return None
        if (records.read(folder / records.CLAIM) or {}).get("executor") != "local":
            return cls(folder, "slurm", ids[0], None)
        starts = [records.start_of_job_process(int(pid), folder) for pid in ids]
        return cls(folder, "local", ",".join(ids), starts)

    def outcome(self, watch: Watch, *, committed: bool) -> Outcome:
        """What has become of it, by the latest that is known."""
        if committed:
            return Done()
        nodes = records.node_records(self.folder)
        failed = [node for node in nodes if node["state"] == "FAILED"]
        if failed:
            return Failed("FAILED", "it failed")
        if self.executor != "slurm":
            return Running() if self._processes() else Failed("ENDED", "it ended without a result")
        seen = watch.seen(self.job_id)
        return judge(committed=False, seen=seen, now=time.monotonic(), started=bool(nodes))

    def alive(self, watch: Watch) -> bool | None:
        """Whether any process of it may still run; None where the cluster does not answer."""
        if self.executor != "slurm":
            return bool(self._processes())
        seen = watch.now(self.job_id)
        return None if seen is None else may_run(seen)

    def cancel(self) -> None:
        """End it and everything it started."""
        if self.executor == "slurm":
            run_command(["scancel", self.job_id])
        for pid in self._processes():
            os.killpg(pid, signal.SIGKILL)

    def gave_up(self, failed: Failed, name: str) -> JobError:
        """Write down that the job failed; the error to raise, with the end of its log."""
        records.give_up(self.folder, failed.state, failed.reason)
        return JobError(
            f"{name}: job {self.job_id} is {failed.state}: {failed.reason}; "
            f"all of it in {self.folder}\n{self.last_words()}"
        )

    def last_words(self, num_lines: int = 15) -> str:
        """The traceback of its first failing rank, else the end of its log."""
        errors = [n["error"] for n in records.node_records(self.folder) if n.get("error")]
        if errors:
            return errors[-1].rstrip()
        return log_tail(self.folder, num_lines)

    def _processes(self) -> list[int]:
        """Of a local job: its processes that are alive, one an element of an array."""
        if self.start is None:
            return []
        pairs = zip(map(int, self.job_id.split(",")), self.start, strict=True)
        return [pid for pid, start in pairs if records.process_start(pid) == start]


def may_run(seen: Seen) -> bool:
    """Whether a job in this state runs or may run again."""
    verdict = judge(committed=False, seen=seen, now=time.monotonic(), started=True)
    return not isinstance(verdict, Failed) and seen.state not in ENDED


def log_files(folder: Path) -> list[Path]:
    """The logs of a job: one, or one a rank or array element."""
    return [*sorted(folder.glob("*.log")), *sorted(folder.glob("*_log.out"))]


def log_tail(folder: Path, num_lines: int) -> str:
    """The last lines of a job's log."""
    logs = log_files(folder)
    lines = [line for log in logs for line in log.read_text(errors="replace").splitlines()]
    return "\n".join(lines[-num_lines:]) or "(it wrote nothing)"


def attempts(jobs: Path, labels: dict[str, Any]) -> list[Path]:
    """Folders of the submissions that were for all of `labels`, oldest first.

    A list label stands for the submission when it holds the value asked for.
    """
    found = []
    for folder in jobs.glob("[0-9]*"):
        record = records.read(folder / records.CLAIM) or records.read(folder / records.JOB)
        if record is not None and all(_holds(record.get(n), v) for n, v in labels.items()):
            found.append((record["claimed"], folder))
    return [folder for _, folder in sorted(found)]


def living(jobs: Path) -> list[Job]:
    """The jobs below `jobs` that may still run; those that ended say so in their folders."""
    found, watch = [], Watch()
    for folder in sorted(jobs.glob("[0-9]*")):
        row, job = records.accounting(folder), Job.load(folder)
        over = row is not None and row["state"] not in ("PENDING", "RUNNING", "STOPPED")
        if job is not None and not over and job.alive(watch) is not False:
            found.append(job)
    return found


def _holds(recorded: Any, value: Any) -> bool:
    return value in recorded if isinstance(recorded, list) else value == recorded
