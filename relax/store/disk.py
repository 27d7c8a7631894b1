"""Every write, rename and removal in a run directory goes through here, durable and in order.

Crash tests replace these functions one by one. Only what need not outlive a crash touches the disk
elsewhere: the lease, and the cache of tokenized prompts.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from relax.errors import ArtifactError, ConfigError

PROBE_BYTES = 2**20
"""A disk that refuses so little is full."""


def write_file(path: Path, write: Callable[[Path], None]) -> None:
    """Let `write` make the file `path`, then force it to the disk."""
    try:
        write(path)
        fsync_file(path)
    except OSError as error:
        raise explained(error, path) from error


def write_bytes(path: Path, data: bytes) -> None:
    """Make the file `path` hold `data`, forced to the disk."""

    def write(target: Path) -> None:
        target.write_bytes(data)

    write_file(path, write)


def write_whole(path: Path, data: bytes) -> None:
    """Make the file `path` hold `data`, or what it held before, also where the power fails."""
    scratch = path.with_name(f".{path.name}")
    write_bytes(scratch, data)
    rename(scratch, path)
    fsync_dir(path.parent)


@contextlib.contextmanager
def new_directory(path: Path) -> Iterator[Path]:
    """A directory to fill, which is at `path` once it is whole; ConfigError where something is."""
    if path.exists():
        raise ConfigError(f"{path}: exists; give a directory that does not")
    scratch = path.with_name(f".{path.name}.part")
    remove_tree(scratch)
    yield scratch
    sync_tree(scratch)
    rename(scratch, path)
    fsync_dir(path.parent)


def fsync_file(path: Path) -> None:
    """Force a file's bytes to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def fsync_dir(path: Path) -> None:
    """Force a directory's entries to the disk."""
    fsync_file(path)


def sync_tree(directory: Path) -> None:
    """Force everything below `directory` to the disk, children before parents."""
    try:
        for folder, _, names in os.walk(directory, topdown=False):
            for name in sorted(names):
                fsync_file(Path(folder, name))
            fsync_dir(Path(folder))
    except OSError as error:
        raise explained(error, directory) from error


def rename(source: Path, target: Path) -> None:
    """Move a file or directory into place; OSError when a non-empty one is there already."""
    os.rename(source, target)


def listed(path: Path) -> bool:
    """Whether the directory that holds `path` lists it.

    A network file system may remember for a minute that a name was not there; a listing asks anew.
    """
    try:
        return path.name in os.listdir(path.parent)
    except (FileNotFoundError, NotADirectoryError):
        return False


def make_dir(path: Path) -> None:
    """Make a directory and its parents, each durably an entry of its own parent."""
    absent = [folder for folder in (path, *path.parents) if not folder.exists()]
    try:
        path.mkdir(parents=True, exist_ok=True)
        for made in absent:
            fsync_dir(made.parent)
    except OSError as error:
        raise explained(error, path) from error


def remove_tree(path: Path) -> None:
    """Remove a directory that nobody may need any more; one already gone is fine."""
    shutil.rmtree(path, ignore_errors=True)


def size(directory: Path) -> int:
    """Bytes of all files below `directory`; what another removes meanwhile counts for nothing."""
    total = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                total += Path(folder, name).stat().st_size
    return total


def free_gib(path: Path) -> float:
    """Free space of the file system that holds `path`, in GiB."""
    return shutil.disk_usage(path).free / 2**30


def explained(error: BaseException, path: Path) -> BaseException:
    """A full disk as one line for the user; any other error, also one so explained, as it is."""
    if isinstance(error, ArtifactError):
        return error
    full = _full(error) if isinstance(error, OSError) else _refusal(path)
    if full is None:
        return error
    return ArtifactError(
        f"{path}: {full}: nothing committed is lost; free some space and run the same command again"
    )


def _full(error: OSError) -> str | None:
    return os.strerror(error.errno) if error.errno in (errno.ENOSPC, errno.EDQUOT) else None


def _refusal(directory: Path) -> str | None:
    """Ask the disk itself: torch and safetensors do not tell why their writing failed."""
    probe = directory / ".probe"
    try:
        probe.write_bytes(bytes(PROBE_BYTES))
        fsync_file(probe)
    except OSError as error:
        return _full(error)
    finally:
        probe.unlink(missing_ok=True)
    return None
