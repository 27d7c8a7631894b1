"""Every write, rename and removal in a run directory goes through here, durable and in order.

Crash tests replace these functions one by one; nothing in the store touches the disk elsewhere.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from relax.errors import ArtifactError


def write_file(path: Path, write: Callable[[Path], None]) -> None:
    """Let `write` make the file `path`, then force it to the disk."""
    try:
        write(path)
        fsync_file(path)
    except OSError as error:
        raise explained(error, path) from error


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
            for name in names:
                fsync_file(Path(folder, name))
            fsync_dir(Path(folder))
    except OSError as error:
        raise explained(error, directory) from error


def rename(source: Path, target: Path) -> None:
    """Move a directory into place; OSError when a non-empty one is there already."""
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
    """Make a directory and its parents."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise explained(error, path) from error


def remove_tree(path: Path) -> None:
    """Remove a directory that nobody may need any more; one already gone is fine."""
    shutil.rmtree(path, ignore_errors=True)


def free_gib(path: Path) -> float:
    """Free space of the file system that holds `path`, in GiB."""
    return shutil.disk_usage(path).free / 2**30


def explained(error: OSError, path: Path) -> Exception:
    """A full disk as one line for the user; any other error as it is."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return ArtifactError(
            f"{path}: {error.strerror}: nothing committed is lost; "
            "free some space and run the same command again"
        )
    return error
