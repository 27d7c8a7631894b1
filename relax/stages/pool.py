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
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from relax.engines import CONTINUOUS
from relax.errors import ConfigError
from relax.stages.shard_faults import EngineDied, EngineSilent, ShardFailed, told_of_load

START_TIMEOUT_S = 600.0
"""Least time that engines get to start and load; rollout_timeout_s where that is more."""
END_TIMEOUT_S = 30.0
"""Time that an idle engine gets to give back its memory and end."""
RANK_VARIABLES = frozenset(
    ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
)
"""What says which rank of a job this is: an engine is none, and must not look for the others."""


@dataclass
class Child:
    """One engine's process."""

    number: int
    process: subprocess.Popen
    pipe: Connection
    unfinished: list[int] = field(default_factory=list)
    """Numbers of the shards that it is at."""
    deadline: float = 0.0
    """time.monotonic() by which it must have ended the next of them."""

    def send(self, command: str, *arguments: Any) -> None:
        """Ask for something. A process that is dead says so when its answer is read."""
        with suppress(BrokenPipeError, ConnectionResetError):
            self.pipe.send((command, arguments))

    def ended(self) -> EngineDied:
        """How it ended; it must have."""
        return EngineDied(self.number, self.process.wait())

    def end(self) -> None:
        """Wait for its end, which it begins when the pipe is closed; kill what is busy or stuck."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(0 if self.unfinished else END_TIMEOUT_S)
        self.process.kill()
        self.process.wait()


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
        """Take the weights in `policy` in every engine.

        Raises what the first to fail raised; all are ended then.
        """
        if not self._children:
            self._children = [self._start(n, gpus) for n, gpus in enumerate(self._gpus)]
        for place, child in enumerate(self._children):
            if child.process.poll() is not None:  # died while nothing was asked of it
                child.pipe.close()
                self._children[place] = self._start(place, self._gpus[place])
        for child in self._children:
            child.send("load", str(policy))
        for child in self._children:
            kind, content = self._answer(child, max(START_TIMEOUT_S, self._timeout_s))
            if kind == "error":
                self._kill()
                self.close()
                raise told_of_load(content, str(policy)) from content

    def run(self, shards: Sequence[Any]) -> Iterator[tuple[int, Any]]:
        """Sample shards; each is given back as it ends. Raises ShardFailed, at the very end."""
        waiting, idle = deque(shards), deque(self._children)
        turn = self._turn(shards)
        busy: list[Child] = []
        failed: ShardFailed | None = None
        while busy or (waiting and failed is None):
            while waiting and idle and failed is None:
                child = idle.popleft()
                self._ask(child, [waiting.popleft() for _ in range(min(turn, len(waiting)))])
                busy.append(child)
            for child, (kind, content) in self._ready(busy):
                if kind == "error":
                    busy.remove(child)
                    failed = failed or ShardFailed(*content)
                    continue
                child.unfinished.remove(content[0])
                child.deadline = time.monotonic() + self._timeout_s
                if not child.unfinished:
                    busy.remove(child)
                    idle.append(child)
                yield content
        if failed is not None:
            raise failed

    def close(self) -> None:
        """End the processes."""
        for child in self._children:
            child.pipe.close()
        for child in self._children:
            child.end()
        self._children = []

    def _kill(self) -> None:
        for child in self._children:
            child.process.kill()

    def _turn(self, shards: Sequence[Any]) -> int:
        """Shards that an engine is asked for at once: its share, where it samples them together."""
        if self._name not in CONTINUOUS or not shards or shards[0].generate:
            return 1
        return -(-len(shards) // len(self._children))

    def _ask(self, child: Child, shards: Sequence[Any]) -> None:
        child.unfinished = [shard.number for shard in shards]
        child.deadline = time.monotonic() + self._timeout_s
        child.send("run", shards)

    def _ready(self, busy: Sequence[Child]) -> list[tuple[Child, tuple[str, Any]]]:
        """Wait for the next to end a shard, die or run out of time.

        An error comes with the number of the shard.
        """
        soonest = min(child.deadline for child in busy)
        pipes = [child.pipe for child in busy]
        ready = wait(pipes, timeout=max(0.0, soonest - time.monotonic()))
        found: list[tuple[Child, tuple[str, Any]]] = []
        for child in busy:
            if child.pipe in ready:
                kind, content = self._answer(child, 0.0)
                if isinstance(content, EngineDied):
                    content = child.unfinished[0], content
                found.append((child, (kind, content)))
            elif time.monotonic() >= child.deadline:
                child.process.kill()
                silent = EngineSilent(child.number, self._timeout_s)
                found.append((child, ("error", (child.unfinished[0], silent))))
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
        environment = {k: v for k, v in os.environ.items() if k not in RANK_VARIABLES}
        environment |= {} if gpus is None else {"CUDA_VISIBLE_DEVICES": gpus}
        environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        process = subprocess.Popen(
            [sys.executable, "-m", "relax.stages.serving", str(theirs.fileno())],
            env=environment,
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
            stdout=2,  # what an engine prints is for the log
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
