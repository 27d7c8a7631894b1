"""A job's folder: who claimed it, what was submitted, what ran, how it ended. One writer a file.

claim.json    the submitter, before it submits: who it is, and what it will submit
job.json      the submitter, once the job has an id: the claim and that id; of a submitter that
              died in between, who finds the job
node-R.json   rank 0 of the job's R-th start (restarts count from 0)
outcome.json  the flow, when it gave the job up: why, and what it cost
Once all is over they are joined in job.json, from which questions about jobs are answered.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
import socket
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

CLAIM, JOB, OUTCOME = "claim.json", "job.json", "outcome.json"
STALE_CLAIM_S = 120.0
PACKED_LINES = 200
"""Lines of a log that outlive a job that ended well."""
SUBMITTED = re.compile(r"(\d+)(?:_\d+)?_submitted\.pkl")


def write(path: Path, record: dict[str, Any]) -> None:
    """Write whole or not at all, also where the power fails."""
    scratch = _scratch(path)
    with scratch.open("w") as file:
        file.write(json.dumps(record, indent=1) + "\n")
        file.flush()
        os.fsync(file.fileno())
    scratch.rename(path)


def read(path: Path) -> dict[str, Any] | None:
    """A record; None where it is not written yet, or damaged: nobody can go by it."""
    try:
        return json.loads(_text(path))
    except (FileNotFoundError, ValueError):
        return None


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError as error:
        if error.errno != errno.ESTALE:  # over NFS: replaced between the opening and the reading
            raise
        return path.read_text()


def _scratch(path: Path) -> Path:
    """A name beside `path` that no other thread of any host uses."""
    return path.with_name(f".{path.name}-{socket.gethostname()}-{threading.get_native_id()}")


def claim(folder: Path, facts: Mapping[str, Any]) -> bool:
    """Make `folder` this process's, or return False: exactly one of many gets it.

    The record is in the directory before the directory has its name.
    """
    scratch, mine = _scratch(folder), {**facts, **identity(), "claimed": time.time()}
    scratch.mkdir(parents=True, exist_ok=True)
    write(scratch / CLAIM, mine)
    try:
        scratch.rename(folder)
    except OSError:
        if read(folder / CLAIM) == mine:  # over NFS a rename that worked may say that it failed
            return True
        shutil.rmtree(scratch, ignore_errors=True)
        if not folder.exists():
            raise
        return False
    return True


def identity() -> dict[str, Any]:
    """Who this process is: host, boot, pid and start time."""
    pid = os.getpid()
    return {
        "host": socket.gethostname(),
        "boot": boot(),
        "pid": pid,
        "start": process_start(pid),
    }


def boot() -> str:
    """This boot of this machine: what pids and start times count within."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def claimant_alive(folder: Path, record: dict[str, Any]) -> bool:
    """Whether the process that claimed `folder` may still submit its job.

    On another host it is taken for dead once the folder is silent: submitting takes seconds.
    """
    if record["host"] != socket.gethostname():
        return _silence(folder) < STALE_CLAIM_S
    return record["boot"] == boot() and (
        process_start(record["pid"]) == record["start"] is not None
    )


def _silence(folder: Path) -> float:
    """Seconds since something was made in `folder`, by the file system's own clock."""
    probe = _scratch(folder.with_name("probe"))
    probe.touch()
    try:
        return probe.stat().st_mtime - folder.stat().st_mtime
    finally:
        probe.unlink()


def submitted_ids(folder: Path) -> list[str]:
    """What submitit recorded itself: a SLURM job's id, or the ids of local processes.

    By it a job is found whose submitter died before it wrote job.json.
    """
    found = [match for path in folder.iterdir() if (match := SUBMITTED.fullmatch(path.name))]
    return sorted({match.group(1) for match in found})


def process_start(pid: int) -> int | None:
    """When a process started, in clock ticks since boot (Linux); None when it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] == "Z" else int(fields[19])


def start_of_job_process(pid: int, folder: Path) -> int:
    """When a process that works for `folder` started; 0 where the pid is gone or another's."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return (process_start(pid) or 0) if os.fsencode(folder) in words else 0


# --- what ran --------------------------------------------------------------------------------


def node_records(folder: Path) -> list[dict[str, Any]]:
    """What rank 0 wrote of each start of the job, oldest first."""
    found = [read(path) for path in sorted(folder.glob("node-*.json"))]
    return sorted((r for r in found if r is not None), key=lambda record: record["restart"])


def last_starts(folder: Path) -> list[dict[str, Any]]:
    """The record of each element's last start; a job that is no array has one element."""
    return _last(node_records(folder))


def _last(nodes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return list({node["element"]: node for node in nodes}.values())


def accounting(folder: Path) -> dict[str, Any] | None:
    """One row about a job: times in seconds since the epoch, durations in seconds.

    step, stages, attempt, executor, job_id, name, submitted, started, ended, queue_s, run_s,
    gpu_s, num_nodes, num_ranks, gpus, restarts, hosts, state, reason. None before it is submitted.
    """
    job = read(folder / JOB)
    if job is None or "state" in job:
        return job
    nodes, outcome = node_records(folder), read(folder / OUTCOME) or {}
    given_up = outcome.get("seen")
    state = outcome.get("state") or _state(_last(nodes), job["elements"])
    over = state not in ("PENDING", "RUNNING")
    ends = [node.get("ended") or given_up or time.time() for node in nodes]
    run_s = sum(end - node["started"] for end, node in zip(ends, nodes, strict=True))
    started = min((node["started"] for node in nodes), default=None)
    return job | {
        "started": started,
        "ended": max(ends, default=given_up) if over else None,
        "queue_s": (started or given_up or time.time()) - job["submitted"],
        "run_s": run_s,
        "gpu_s": run_s * job["gpus"],
        "restarts": max((node["restart"] for node in nodes), default=0),
        "hosts": sorted({host for node in nodes for host in node["hosts"]}),
        "state": state,
        "reason": outcome.get("reason", ""),
    }


def _state(last: list[dict[str, Any]], num_elements: int) -> str:
    """What the nodes' own records say: of an array, COMPLETED once all elements are."""
    states = [node["state"] for node in last]
    if "FAILED" in states:
        return "FAILED"
    if states.count("COMPLETED") == num_elements:
        return "COMPLETED"
    return "RUNNING" if states else "PENDING"


COST = ("queue_s", "run_s", "gpu_s", "restarts")


def give_up(folder: Path, state: str, reason: str) -> None:
    """Write down that nobody waits for a job any more, why, and what it cost until then."""
    row = accounting(folder) or {}
    cost = {name: row[name] for name in COST if name in row}
    write(folder / OUTCOME, {**cost, "state": state, "reason": reason, "seen": time.time()})


def settle(folder: Path, *, lingering_s: float = 5.0) -> bool:
    """Pack the folder of a job that ended well into job.json, its log's end included.

    A job that failed keeps everything. False while the job may still use its folder.
    """
    row = accounting(folder)
    if row is None or row["state"] != "COMPLETED":
        return False
    if time.time() - row["ended"] < lingering_s:
        return False
    lines = _log_lines(folder)
    if "state" not in (read(folder / JOB) or {}):  # else another was faster, and may have the logs
        write(folder / JOB, row | {"log": lines[-PACKED_LINES:]})
    for path in folder.iterdir():
        if path.name != JOB and path.suffix in (".json", ".pkl", ".sh", ".log", ".out"):
            path.unlink(missing_ok=True)
    return True


def _log_lines(folder: Path) -> list[str]:
    """What the logs of a folder hold, less those that another removes meanwhile."""
    lines: list[str] = []
    for log in sorted(path for path in folder.iterdir() if path.suffix in (".log", ".out")):
        with contextlib.suppress(FileNotFoundError):
            lines += log.read_text(errors="replace").splitlines()
    return lines
