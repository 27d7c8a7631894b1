"""Data-parallel engines: processes of their own, a group of GPUs each, that take shards by turns.

A process that dies or hangs costs its shard: what the others are at is waited for and kept.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from relax.errors import ConfigError
from relax.stages.shard_faults import EngineDied, EngineSilent, ShardFailed

START_TIMEOUT_S = 600.0


@dataclass
class Child:
    """One engine's process."""

    number: int
    process: subprocess.Popen
    pipe: Connection

    def send(self, command: str, *arguments: Any) -> None:
        """Ask for something. A process that is dead says so when its answer is read."""
        with suppress(BrokenPipeError, ConnectionResetError):
            self.pipe.send((command, arguments))

    def ended(self) -> EngineDied:
        """How it ended; it must have."""
        return EngineDied(self.number, self.process.wait())

    def kill(self) -> None:
        """End it at once."""
        self.process.kill()
        self.process.wait()
        self.pipe.close()


class EnginePool:
    """`num_engines` engines called `name`, with `options`, `gpus_per_engine` GPUs each.

    The processes start with the first `load`, and end with this one.
    """

    def __init__(
        self,
        name: str,
        options: dict[str, Any],
        *,
        num_engines: int,
        gpus_per_engine: int,
        timeout_s: float,
        num_threads: int,
    ) -> None:
        self._name, self._options = name, options
        self._timeout_s, self._num_threads = timeout_s, num_threads
        self._gpus = gpu_groups(num_engines, gpus_per_engine)
        self._children: list[Child] = []

    def load(self, policy: Path) -> None:
        """Take the weights in `policy` in every engine; raises what the first to fail raised."""
        if not self._children:
            self._children = [self._start(n, gpus) for n, gpus in enumerate(self._gpus)]
        for place, child in enumerate(self._children):
            if child.process.poll() is not None:  # died while nothing was asked of it
                child.pipe.close()
                self._children[place] = self._start(place, self._gpus[place])
        for child in self._children:
            child.send("load", str(policy))
        for child in self._children:
            kind, content = self._answer(child, START_TIMEOUT_S)
            if kind == "error":
                raise content

    def run(self, shards: Sequence[Any]) -> Iterator[tuple[int, Any]]:
        """Sample shards; each is given back as it ends. Raises ShardFailed, at the very end."""
        waiting, idle = deque(shards), deque(self._children)
        busy: dict[Connection, tuple[Child, int, float]] = {}
        failed: ShardFailed | None = None
        while busy or (waiting and failed is None):
            while waiting and idle and failed is None:
                child, shard = idle.popleft(), waiting.popleft()
                child.send("run", shard)
                busy[child.pipe] = child, shard.number, time.monotonic() + self._timeout_s
            for child, number, answer in self._ready(busy):
                del busy[child.pipe]
                kind, content = answer
                if kind == "error":
                    failed = failed or ShardFailed(number, content)
                else:
                    idle.append(child)
                    yield number, content
        if failed is not None:
            raise failed

    def close(self) -> None:
        """End the processes."""
        for child in self._children:
            child.kill()
        self._children = []

    def _ready(
        self, busy: dict[Connection, tuple[Child, int, float]]
    ) -> list[tuple[Child, int, tuple[str, Any]]]:
        """Wait for the next to answer, die or run out of time."""
        soonest = min(deadline for _, _, deadline in busy.values())
        ready = wait(list(busy), timeout=max(0.0, soonest - time.monotonic()))
        found = []
        for pipe, (child, number, deadline) in list(busy.items()):
            if pipe in ready:
                found.append((child, number, self._answer(child, 0.0)))
            elif time.monotonic() >= deadline:
                child.process.kill()
                found.append(
                    (child, number, ("error", EngineSilent(child.number, self._timeout_s)))
                )
        return found

    def _answer(self, child: Child, timeout_s: float) -> tuple[str, Any]:
        try:
            if not child.pipe.poll(timeout_s):
                child.process.kill()
                return "error", EngineSilent(child.number, timeout_s)
            return child.pipe.recv()
        except (EOFError, ConnectionResetError):
            return "error", child.ended()

    def _start(self, number: int, gpus: str | None) -> Child:
        """`python -m relax.stages.serving`, at the other end of a socket pair."""
        ours, theirs = socket.socketpair()
        environment = os.environ | ({} if gpus is None else {"CUDA_VISIBLE_DEVICES": gpus})
        environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        process = subprocess.Popen(
            [sys.executable, "-m", "relax.stages.serving", str(theirs.fileno())],
            env=environment,
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr.fileno() if _has_fileno(sys.stderr) else None,
        )
        theirs.close()
        pipe = Connection(ours.detach())
        pipe.send((self._name, self._options, self._num_threads))
        return Child(number, process, pipe)


def gpu_groups(num_engines: int, gpus_per_engine: int) -> list[str | None]:
    """CUDA_VISIBLE_DEVICES of each engine, None on a machine without GPUs; ConfigError when few."""
    import torch

    if not torch.cuda.is_available():
        return [None] * num_engines
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = named.split(",") if named else [str(i) for i in range(torch.cuda.device_count())]
    if len(devices) < num_engines * gpus_per_engine:
        raise ConfigError(
            f"rollout.rollout_num_engines * rollout_num_gpus_per_engine = {num_engines} * "
            f"{gpus_per_engine}: this machine shows {len(devices)} GPUs"
        )
    return [
        ",".join(devices[i * gpus_per_engine : (i + 1) * gpus_per_engine])
        for i in range(num_engines)
    ]


def _has_fileno(stream: Any) -> bool:
    """Tests put a stream without a file in the place of stderr."""
    try:
        stream.fileno()
    except (OSError, ValueError, AttributeError):
        return False
    return True
