"""A copy of the code in the run directory: jobs import it, whatever becomes of the checkout."""

from __future__ import annotations

import hashlib
import os
import shutil
import socket
from pathlib import Path

from relax.config import Config, flag_of
from relax.custom import source_file, split
from relax.errors import ArtifactError
from relax.stages.functions import FUNCTIONS, copied_as, own_path
from relax.store import Run, disk
from relax.store.lease import start_time

PACKAGES = ("flows", "tasks", "relax", "slurm")
CHECKOUT = Path(__file__).resolve().parent.parent


def snapshot(run: Run) -> Path:
    """RUN/code/<hash>, made once for each state of the code and the user's own files."""
    target = code_dir(run.root, run.config)
    if not target.exists():
        try:
            _copy(_files(run.config), target)
        except OSError as error:
            raise disk.explained(error, target) from error
    return target


def code_dir(root: Path, config: Config) -> Path:
    """Where the copy of the code as it stands now belongs."""
    digest = hashlib.sha256()
    for name, path in _files(config).items():
        digest.update(f"{name}\0".encode() + path.read_bytes())
    return root / "code" / digest.hexdigest()[:16]


def _files(config: Config) -> dict[Path, Path]:
    files = {
        path.relative_to(CHECKOUT): path
        for package in PACKAGES
        for path in sorted((CHECKOUT / package).rglob("*.py"))
    }
    for setting in FUNCTIONS:
        if path := own_path(config, setting):
            given = split(path, flag_of(setting))[0]
            if given.endswith(".py"):
                files[copied_as(setting, given)] = source_file(path, flag=flag_of(setting))
    return files


def _copy(files: dict[Path, Path], target: Path) -> None:
    """Whole or not at all; another flow may do the same at the same time."""
    scratch = target.with_name(f".{target.name}-{socket.gethostname()}-{os.getpid()}")
    for leftover in target.parent.glob(".*"):
        if leftover == scratch or _is_abandoned(leftover):
            disk.remove_tree(leftover)
    for name, path in files.items():
        disk.make_dir((scratch / name).parent)
        shutil.copyfile(path, scratch / name)
    disk.sync_tree(scratch)
    if sum(path.is_file() for path in scratch.rglob("*")) != len(files):
        raise ArtifactError(f"{scratch}: somebody removed files from it; run the command again")
    try:
        disk.rename(scratch, target)
    except OSError:
        if not target.exists():
            raise
        disk.remove_tree(scratch)


def _is_abandoned(scratch: Path) -> bool:
    """Whether a flow of this host was killed while it made it; of other hosts nobody can tell."""
    host, _, pid = scratch.name.partition("-")[2].rpartition("-")
    return host == socket.gethostname() and start_time(int(pid)) is None
