"""What one flow holds while it runs: the run, its lease, what is warm, and when to stop."""

from __future__ import annotations

import itertools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from relax.config import Config
from relax.store import Manifest, Run, disk
from relax.store.lease import Lease
from tasks.code import snapshot


class Stopped(KeyboardInterrupt):
    """The user asked to stop (Ctrl-C); everything committed stays."""


Report = Callable[[Path, Manifest, bool], None]
"""Told of every finished stage: the run, its manifest, whether it was there already."""


class Session:
    """One flow on one run directory. Everything that must survive it is on disk already."""

    def __init__(self, config: Config, run: Run, lease: Lease, report: Report) -> None:
        self.config, self.run, self.lease, self.report = config, run, lease, report
        self.code = snapshot(run)
        self.warm: Any = None
        self.stopping = threading.Event()
        self._attempts = itertools.count(1)

    def attempt(self) -> str:
        """A name that no other attempt has, now or after a restart of this machine."""
        return f"inline-{os.getpid()}-{int(time.time())}-{next(self._attempts)}"

    def before_stage(self) -> None:
        """At every boundary: wait for disk space, stop if asked to, leave if replaced."""
        self._wait_for_space()
        if self.stopping.is_set():
            raise Stopped(f"stopped; run the same command again to continue {self.run.root}")
        self.lease.check()

    def _wait_for_space(self) -> None:
        floor, told = self.config.run.min_free_gib, False
        while (free := disk.free_gib(self.run.root)) < floor and not self.stopping.is_set():
            if not told:
                print(
                    f"{self.run.root}: {free:.2f} GiB free, min_free_gib = {floor}: "
                    "paused until there is more",
                    file=sys.stderr,
                )
                told = True
            time.sleep(1.0)

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """First Ctrl-C: stop after the stage in hand. Second: at once."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def interrupt(*_: object) -> None:
            self.stopping.set()
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            print("\nstopping after this stage; Ctrl-C again: at once", file=sys.stderr)

        before = signal.signal(signal.SIGINT, interrupt)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    @property
    def jobs(self) -> Path:
        """RUN/jobs."""
        return self.run.root / "jobs"
