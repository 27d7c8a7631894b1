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
from slurm import records
from slurm.jobs import Job
from slurm.watch import Watch
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
        self.relay: Callable[[str], None] = lambda line: None
        """Told of every line that a job writes while it is waited for."""
        self.warm: Any = None
        self.plan: dict[int, list[str]] = {}
        """Stages of each step in their order, as the flow's loop will ask for them."""
        self.watch = Watch()
        self.ahead: Job | None = None
        """What waits in the queue for the job in hand to end well."""
        self.stopping = threading.Event()
        self.making: set[tuple[int, str]] = set()
        """Stages that this flow's own jobs were submitted for: found committed, they are new."""
        self._served: list[Path] = []
        self._attempts = itertools.count(1)

    def attempt(self) -> str:
        """A name that no other attempt has, now or after a restart of this machine."""
        return f"inline-{os.getpid()}-{int(time.time())}-{next(self._attempts)}"

    def before_stage(self) -> None:
        """At every boundary: wait for disk space, stop if asked to, leave if replaced."""
        self._wait_for_space()
        self.stop_if_asked()
        self.lease.check()
        self._settle()

    def stop_if_asked(self) -> None:
        """Leave when the user asked to stop and no job is in hand, but one that was sent ahead."""
        if self.stopping.is_set():
            if not self.config.slurm.detach:
                self.cancel_ahead()
            raise Stopped(f"stopped; run the same command again to continue {self.run.root}")

    def cancel_ahead(self) -> None:
        """End what waits for a job that will not end well. The cluster does so too, but later."""
        if self.ahead is not None:
            records.give_up(self.ahead.folder, "CANCELLED", "the job before it did not end well")
            self.ahead.cancel()
        self.ahead = None

    def served(self, job: Job) -> None:
        """A job gave what it was for: nobody asks about it again, and its folder is tidied."""
        self.watch.forget(job.job_id)
        if job.folder not in self._served:
            self._served.append(job.folder)

    def finish(self, patience_s: float = 3.0) -> None:
        """At the end of a flow: pack what the last jobs leave, once they are out of the way."""
        until = time.monotonic() + patience_s
        while self._served and time.monotonic() < until:
            self._served = [f for f in self._served if not records.settle(f, lingering_s=1.0)]
            time.sleep(0.1 if self._served else 0.0)

    def _settle(self) -> None:
        self._served = [folder for folder in self._served if not records.settle(folder)]

    def _wait_for_space(self) -> None:
        floor, told = self.config.run.min_free_gib, False
        while (free := disk.free_gib(self.run.root)) < floor and not self.stopping.is_set():
            if not told:
                print(
                    f"{self.run.root}: {free:.2f} GiB free, min_free_gib = {floor}: "
                    "paused until there is more; Ctrl-C to stop, or lower min_free_gib",
                    file=sys.stderr,
                )
                told = True
            time.sleep(1.0)

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """First Ctrl-C or TERM: stop after the stage in hand, cancel its job. Second: at once."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def interrupt(number: int, _: object) -> None:
            self.stopping.set()
            signal.signal(number, signal.SIG_DFL)
            print("\nstopping after this stage; Ctrl-C again: at once", file=sys.stderr)

        before = {n: signal.signal(n, interrupt) for n in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @property
    def jobs(self) -> Path:
        """RUN/jobs."""
        return self.run.root / "jobs"
