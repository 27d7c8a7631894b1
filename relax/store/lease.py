"""One flow per run directory: a courtesy lock. Safety rests on first-commit-wins."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
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
    """The lease of this process on a run directory; a thread keeps its file's mtime fresh.

    Leases are numbered and the last one counts. Whoever finds it given back or stale links the
    next number into place, which only one can. No number is used twice, so that a slow one with
    an old finding cannot disturb who was faster.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.directory = root / "lease"
        self.me = identity()
        self.number = 0
        self._stop = threading.Event()

    def __enter__(self) -> Lease:
        """Take the lease; ConfigError when a living flow holds it."""
        disk.make_dir(self.directory)
        while not self._take_next():
            pass
        threading.Thread(target=self._beat, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        """Give the lease back: its number stays, with nobody's name in it.

        A full disk lets a file be emptied; a lease that cannot be given back ends as its flow does.
        """
        self._stop.set()
        with contextlib.suppress(OSError):
            if self._holder() == self.me:
                os.truncate(self.path, 0)

    def check(self) -> None:
        """Raise ConfigError when another flow has taken the run over."""
        holder = self._holder()
        if holder != self.me:
            by = f"process {holder['pid']} on {holder['host']}" if holder else "someone"
            raise ConfigError(f"{self.root}: taken over by {by}; this flow ends here")

    @property
    def path(self) -> Path:
        """The file of this process's lease."""
        return self._file(self.number)

    def _file(self, number: int) -> Path:
        return self.directory / f"{number:06d}.json"

    def _numbers(self) -> list[int]:
        return [int(path.stem) for path in self.directory.glob("[0-9]*.json")]

    def _last(self) -> int:
        return max(self._numbers(), default=0)

    def _holder(self) -> dict | None:
        return _read(self._file(self._last()))

    def _take_next(self) -> bool:
        """Link the next number; False when another was faster, whose lease must be looked at."""
        last = self._last()
        holder = _read(self._file(last))
        if holder is not None and self._alive(holder, self._file(last)):
            raise ConfigError(
                f"{self.root}: in use by process {holder['pid']} on {holder['host']}; "
                "wait for it, stop it, or give another --run-dir"
            )
        self.number = last + 1
        if not self._link():
            return False
        if self._last() != self.number:
            self.path.unlink(missing_ok=True)
            return False
        for number in self._numbers():
            if number < self.number:
                self._file(number).unlink(missing_ok=True)
        return True

    def _link(self) -> bool:
        """Make the file whole under a scratch name, then link it into place: only one can.

        Over NFS a link may work and yet be refused (its answer was lost, and it was asked again):
        the count of names tells.
        """
        scratch = self.directory / f".{self.me['host']}-{self.me['pid']}"
        disk.write_bytes(scratch, json.dumps(self.me).encode())
        try:
            os.link(scratch, self.path)
        except FileExistsError:
            return scratch.stat().st_nlink == 2
        finally:
            scratch.unlink()
        return True

    def _alive(self, holder: dict, path: Path) -> bool:
        if holder["host"] == self.me["host"]:
            same_boot = holder["boot"] == self.me["boot"]
            return same_boot and start_time(holder["pid"]) == holder["start"]
        return self._silence(path) < STALE_S

    def _silence(self, path: Path) -> float:
        """Seconds since the holder's last beat, by the file system's own clock."""
        probe = self.directory / f".probe-{self.me['host']}-{self.me['pid']}"
        probe.touch()
        try:
            return probe.stat().st_mtime - path.stat().st_mtime
        except FileNotFoundError:
            return STALE_S
        finally:
            probe.unlink()

    def _beat(self) -> None:
        """A beat that the file system refuses is left out; only many in a row count."""
        while not self._stop.wait(BEAT_S):
            with contextlib.suppress(OSError):
                os.utime(self.path)


def _read(path: Path) -> dict | None:
    """Who a lease file names; None when it is given back, gone or damaged."""
    try:
        holder = json.loads(path.read_text())
    except (FileNotFoundError, ValueError):
        return None
    whole = isinstance(holder, dict) and holder.keys() == {"host", "boot", "pid", "start"}
    return holder if whole else None
