"""A node's own copies of models: one per content hash, below RELAX_LOCAL_DIR (the site's)."""

from __future__ import annotations

import fcntl
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from relax.errors import ArtifactError
from relax.store.fingerprint import model_fingerprint

LOCAL_DIR = "RELAX_LOCAL_DIR"
SPARE_BYTES = 2**30
"""Left free on the node's disk, for the caches of compilers."""


def local_model(directory: Path, content: str) -> Path:
    """This node's copy of the model in `directory`, whose fingerprint is `content`.

    Made by the first process of the node that asks; the others wait for it. One that is damaged is
    made again. `directory` itself where there is no node-local directory, or no room in it.
    """
    base = os.environ.get(LOCAL_DIR)
    if not base:
        return directory
    copy = Path(base) / "models" / content
    try:
        copy.parent.mkdir(parents=True, exist_ok=True)
        with _locked(copy.with_name(f"{content}.lock")):
            if not _is_whole(copy, content):
                _make(copy, directory, content)
    except OSError as error:
        print(f"{copy}: {error.strerror or error}; {directory} is read instead", file=sys.stderr)
        return directory
    return copy


def _make(copy: Path, directory: Path, content: str) -> None:
    """Copy the files, follow links, verify, and rename into place; OSError without room."""
    files = [path for path in sorted(directory.iterdir()) if path.is_file()]
    need = sum(path.stat().st_size for path in files) + SPARE_BYTES
    free = shutil.disk_usage(copy.parent).free
    if free < need:
        raise OSError(f"{free / 2**30:.1f} GiB free, {need / 2**30:.1f} needed")
    scratch = copy.with_name(f".{content}")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    try:
        for path in files:
            shutil.copyfile(path, scratch / path.name)
        if not _is_whole(scratch, content):
            raise ArtifactError(f"{directory}: changed since the run began; put the old files back")
        shutil.rmtree(copy, ignore_errors=True)
        scratch.rename(copy)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _is_whole(directory: Path, content: str) -> bool:
    try:
        return model_fingerprint(directory) == content
    except ArtifactError:  # not there, or part of it
        return False


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """The only process of this node in here; the lock ends with its process."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
