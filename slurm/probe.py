"""Ask a cluster before it is needed: would these jobs be accepted, and do its nodes work?"""

from __future__ import annotations

import importlib
import os
import re
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurm import records
from slurm.errors import JobError
from slurm.resources import Resources
from slurm.submit import Order, clean_environment, refusal, script
from slurm.watch import run_command

RENDEZVOUS_S = 30.0


@dataclass(frozen=True)
class Partition:
    """The largest that one partition offers."""

    name: str
    nodes: int
    cpus: int
    memory_mb: int
    gpus: int
    minutes: float
    """inf where there is no limit."""


def partitions() -> dict[str, Partition]:
    """All partitions by name, the default one under "" too; JobError where sinfo is silent."""
    answer = run_command(["sinfo", "-h", "-o", "%R|%P|%D|%c|%m|%G|%l"])
    if answer is None or answer.returncode:
        said = answer.stderr.strip() if answer else "sinfo is absent or the cluster does not answer"
        raise JobError(f"check: {said}; run this where jobs can be submitted")
    found: dict[str, Partition] = {}
    for line in answer.stdout.splitlines():
        name, starred, nodes, cpus, memory, gres, limit = line.strip().split("|")
        one = Partition(
            name=name,
            nodes=int(nodes),
            cpus=int(cpus.rstrip("+")),
            memory_mb=int(memory.rstrip("+")),
            gpus=sum(int(n) for n in re.findall(r"gpu:(?:[^:,(]+:)?(\d+)", gres)),
            minutes=minutes_of(limit),
        )
        for key in {name, "" if starred.endswith("*") else name}:
            found[key] = _larger(found.get(key), one)
    return found


def _larger(one: Partition | None, other: Partition) -> Partition:
    """A partition of different nodes: their number added up, the best node's size."""
    if one is None:
        return other
    return Partition(
        other.name,
        one.nodes + other.nodes,
        max(one.cpus, other.cpus),
        max(one.memory_mb, other.memory_mb),
        max(one.gpus, other.gpus),
        other.minutes,
    )


def minutes_of(limit: str) -> float:
    """`1-00:30:00` -> 1470.0; `infinite` -> inf."""
    if not limit[:1].isdigit():
        return float("inf")
    days, _, clock = limit.rpartition("-")
    parts = [int(part) for part in clock.split(":")]
    while len(parts) < 3:
        parts.insert(0, 0)
    hours, minutes, seconds = parts
    return int(days or 0) * 1440 + hours * 60 + minutes + seconds / 60


def faults(asked: Resources, offered: Mapping[str, Partition]) -> list[str]:
    """What of `asked` its partition cannot give, and the most it could; empty where it fits."""
    names = ", ".join(sorted(name for name in offered if name))
    there = offered.get(asked.partition)
    if there is None:
        return [f"partition = {asked.partition!r}: no such partition; there are: {names}"]
    cpus = asked.tasks_per_node * asked.cpus_per_task
    limits = (
        ("nodes", asked.nodes, there.nodes),
        ("gpus_per_node", asked.gpus_per_node, there.gpus),
        ("tasks_per_node * cpus_per_task", cpus, there.cpus),
        ("mem_gb", asked.mem_gb, round(there.memory_mb / 1024, 1)),
        ("minutes", asked.minutes, there.minutes),
    )
    return [
        f"{name} = {value}: partition {there.name} has {most:g}"
        for name, value, most in limits
        if value > most
    ]


def largest(there: Partition) -> str:
    """The largest job that a partition would take."""
    limit = "no time limit" if there.minutes == float("inf") else f"{there.minutes:g} minutes"
    return (
        f"{there.nodes} nodes x ({there.gpus} GPUs, {there.cpus} CPUs, "
        f"{there.memory_mb / 1024:.1f} GB), {limit}"
    )


def scheduler_says(folder: Path, order: Order) -> str:
    """What `sbatch --test-only` says of a job: when it would start. JobError when refused."""
    words = ["sbatch", "--test-only", "--parsable"]
    with clean_environment():
        answer = subprocess.run(
            words,
            input=script(folder, order),
            text=True,
            capture_output=True,
            check=False,
            timeout=60,
        )
    if answer.returncode:
        raise JobError(refusal(order, answer.stderr.strip()))
    return " ".join(answer.stderr.replace("sbatch:", "").split())


# --- on the nodes ----------------------------------------------------------------------------


def on_node(modules: Sequence[str], folder: str, token: str, gpus: int, **given: Any) -> None:
    """Try on every rank what a stage will need; the findings go to probe-RANK.json in `folder`."""
    del given  # attempt and stop, which every target gets
    rank = int(os.environ["RANK"])
    tests: dict[str, Callable[[], str]] = {
        "imports": lambda: _imports(modules),
        "GPUs": lambda: _gpus(gpus),
        "run directory": lambda: _directory(Path(folder), token, rank),
        "rendezvous": lambda: rendezvous(os.environ),
    }
    found: dict[str, Any] = {"rank": rank, "host": socket.gethostname()}
    for name, test in tests.items():
        try:
            found[name] = {"fine": True, "said": test()}
        except (OSError, ImportError, AssertionError) as error:
            found[name] = {"fine": False, "said": f"{type(error).__name__}: {error}"}
    records.write(Path(folder) / f"probe-{rank}.json", found)


def _imports(modules: Sequence[str]) -> str:
    start = time.perf_counter()
    found = [importlib.import_module(name) for name in modules]
    versions = [f"{m.__name__} {m.__dict__.get('__version__', '')}".strip() for m in found]
    return f"{', '.join(versions)} in {time.perf_counter() - start:.1f} s"


def _gpus(wanted: int) -> str:
    visible = [g for g in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if g]
    assert len(visible) >= wanted, f"{len(visible)} visible, gpus_per_node = {wanted}"
    return f"{len(visible)} visible, {wanted} asked for"


def _directory(folder: Path, token: str, rank: int) -> str:
    """The submitter's file is seen, and mkdir and rename do what commits rest on."""
    assert (folder / "token").read_text() == token, f"{folder} is another directory here"
    scratch, final = folder / f"scratch-{rank}", folder / f"renamed-{rank}"
    scratch.mkdir()
    (scratch / "file").write_text(token)
    scratch.rename(final)
    (folder / f"other-{rank}").mkdir()
    (folder / f"other-{rank}" / "file").write_text("")
    try:
        final.rename(folder / f"other-{rank}")
    except OSError:
        return f"{folder}: seen, mkdir, rename"
    raise AssertionError(f"{folder}: a rename over a directory with files succeeds")


def rendezvous(environ: Mapping[str, str]) -> str:
    """Every other rank reaches rank 0 at MASTER_ADDR:MASTER_PORT."""
    rank, size = int(environ["RANK"]), int(environ["WORLD_SIZE"])
    address = environ["MASTER_ADDR"], int(environ["MASTER_PORT"])
    if size == 1:
        return "one rank"
    if rank == 0:
        with socket.create_server(("", address[1])) as server:
            server.settimeout(RENDEZVOUS_S)
            for _ in range(size - 1):
                server.accept()[0].close()
        return f"{size - 1} ranks came to {address[0]}:{address[1]}"
    until = time.monotonic() + RENDEZVOUS_S
    while True:
        try:
            socket.create_connection(address, timeout=RENDEZVOUS_S).close()
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(0.1)
        else:
            return f"reached {address[0]}:{address[1]}"
