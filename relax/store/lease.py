"""One flow per run directory: a courtesy lock. Safety rests on first-commit-wins."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from pathlib import Path

from relax.errors import ConfigError
from relax.store import disk

STALE_S = 120.0
BEAT_S = 10.0


def start_time(pid: int) -> int | None:
    """When a process started, in clock ticks since boot (Linux); None when it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] == "Z" else int(fields[19])


def identity() -> dict:
    """Who this process is: host, boot, pid and start time."""
    pid = os.getpid()
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return {"host": socket.gethostname(), "boot": boot, "pid": pid, "start": start_time(pid)}


class Lease:
    """The lease of this process on a run directory; a thread keeps its file's mtime fresh."""

    def __init__(self, root: Path) -> None:
        self.path = root / "lease.json"
        self.me = identity()
        self._stop = threading.Event()

    def __enter__(self) -> Lease:
        """Take the lease; ConfigError when a living flow holds it."""
        disk.make_dir(self.path.parent)
        while not self._claim():
            holder = self._holder()
            if holder is not None and self._alive(holder):
                raise ConfigError(
                    f"{self.path.parent}: in use by process {holder['pid']} on {holder['host']}; "
                    "wait for it, stop it, or give another --run-dir"
                )
            self._move_aside(holder)
        threading.Thread(target=self._beat, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._holder() == self.me:
            self.path.unlink(missing_ok=True)

    def check(self) -> None:
        """Raise ConfigError when another flow has taken the run over.

        A lease that is nowhere was moved aside by a late mover, which brings it back or dies:
        this flow makes it anew meanwhile.
        """
        if self._holder() is None and self._claim():
            return
        holder = self._holder()
        if holder != self.me:
            by = f"process {holder['pid']} on {holder['host']}" if holder else "someone"
            raise ConfigError(f"{self.path.parent}: taken over by {by}; this flow ends here")

    def _claim(self) -> bool:
        """Make the file whole under a scratch name, then link it into place: only one can.

        Over NFS a link may work and yet be refused (its answer was lost, and it was asked again):
        the count of names tells.
        """
        scratch = self.path.with_name(f".lease-{self.me['host']}-{self.me['pid']}")
        disk.write_bytes(scratch, json.dumps(self.me).encode())
        try:
            os.link(scratch, self.path)
        except FileExistsError:
            return scratch.stat().st_nlink == 2
        finally:
            scratch.unlink()
        return True

    def _holder(self) -> dict | None:
        return _read(self.path)

    def _alive(self, holder: dict) -> bool:
        if holder["host"] == self.me["host"]:
            same_boot = holder["boot"] == self.me["boot"]
            return same_boot and start_time(holder["pid"]) == holder["start"]
        return self._silence() < STALE_S

    def _silence(self) -> float:
        """Seconds since the holder's last beat, by the file system's own clock."""
        probe = self.path.with_name(f".probe-{self.me['host']}-{self.me['pid']}")
        probe.touch()
        try:
            return probe.stat().st_mtime - self.path.stat().st_mtime
        except FileNotFoundError:
            return STALE_S
        finally:
            probe.unlink()

    def _move_aside(self, stale: dict | None) -> None:
        """Of several that find a stale lease only one wins this rename.

        One that comes late, and moves the lease of who was faster, puts it back: over that of
        a third who came in between, for who was faster works on the run already.
        """
        aside = self.path.with_name(f".lease-stale-{self.me['pid']}-{time.monotonic_ns()}")
        try:
            disk.rename(self.path, aside)
        except FileNotFoundError:
            return
        if _read(aside) != stale:
            disk.rename(aside, self.path)
        else:
            aside.unlink()

    def _beat(self) -> None:
        while not self._stop.wait(BEAT_S):
            self._beat_once()

    def _beat_once(self) -> None:
        """A beat that the file system refuses is left out; only many in a row count."""
        with contextlib.suppress(OSError):
            if self._holder() == self.me:
                os.utime(self.path)


def _read(path: Path) -> dict | None:
    """Who a lease file names; None when it is gone or damaged."""
    try:
        holder = json.loads(path.read_text())
    except (FileNotFoundError, ValueError):
        return None
    whole = isinstance(holder, dict) and holder.keys() == {"host", "boot", "pid", "start"}
    return holder if whole else None
