"""The trainer's state on disk: torch.distributed.checkpoint, checked, resharded on load.

A checkpoint is a directory that appears by a rename when every rank has written and hashed its
part: DCP's files and files.json with their sizes and sha256.
"""

import hashlib
import json
import shutil
import warnings
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import async_save as dcp_async_save
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from relax.errors import ArtifactError
from relax.trainer.ranks import gather

FILES = "files.json"


@dataclass(frozen=True)
class State:
    """What the next step depends on; nothing random is carried, so no generator is saved."""

    weights: Mapping[str, nn.Parameter]
    optimizer: torch.optim.Optimizer
    step: int
    skips_in_a_row: int

    def tensors(self) -> dict[str, Any]:
        """Live tensors by name; loading fills them in place."""
        moments = self.optimizer.state
        return {
            "model": {name: weight.detach() for name, weight in self.weights.items()},
            "optimizer": {
                name: dict(moments[weight])
                for name, weight in self.weights.items()
                if weight in moments
            },
            "progress": torch.tensor([self.step, self.skips_in_a_row]),
        }


class PendingSave:
    """A checkpoint being written; every rank calls wait(), which makes it visible."""

    def __init__(self, future: Future, staging: Path, directory: Path) -> None:
        self._future = future
        self._staging = staging
        self._directory = directory

    def wait(self) -> None:
        """Block until the files are whole, then rename them into place."""
        self._future.result()
        _seal(self._staging, self._directory)


def save(state: State, directory: Path) -> None:
    """Write a checkpoint and return when it is in place."""
    staging = _open_staging(directory)
    dcp_save(state.tensors(), checkpoint_id=staging)
    _seal(staging, directory)


def save_async(state: State, directory: Path) -> PendingSave:
    """Copy the state to host memory, return, and write in a thread."""
    staging = _open_staging(directory)
    # A group of its own: the thread's collectives must not meet those of the next step.
    group = cast(dist.ProcessGroup, dist.new_group(backend="gloo"))
    future = dcp_async_save(state.tensors(), checkpoint_id=staging, process_group=group)
    assert isinstance(future, Future)
    return PendingSave(future, staging, directory)


def restore(state: State, directory: Path) -> tuple[int, int]:
    """Fill the live tensors; returns step and skips in a row. Damage is an ArtifactError."""
    fault = find_fault(directory)
    if fault:
        raise ArtifactError(f"checkpoint {directory}: {fault}; restore an older one")
    tensors = state.tensors()
    _refuse_foreign(tensors, directory)
    dcp_load(tensors, checkpoint_id=directory)
    step, skips = tensors["progress"].tolist()
    return step, skips


def steps_done(directory: Path) -> int | None:
    """Optimizer steps that a checkpoint has behind it, without restoring it; None if damaged."""
    if find_fault(directory):
        return None
    progress = torch.tensor([0, 0])
    dcp_load({"progress": progress}, checkpoint_id=directory)
    return int(progress[0])


def newest_whole(root: Path) -> Path:
    """The newest checkpoint (by name) below root that is undamaged; the others are warned of."""
    found = list_checkpoints(root)
    for directory in reversed(found):
        fault = find_fault(directory)
        if not fault:
            return directory
        message = f"checkpoint {directory}: {fault}; falling back to the one before"
        warnings.warn(message, RuntimeWarning, stacklevel=2)
    raise ArtifactError(f"checkpoints {root}: none of {len(found)} is whole; start from a policy")


def list_checkpoints(root: Path) -> list[Path]:
    """Checkpoints below root, oldest first: directories with a numeric name."""
    if not root.is_dir():
        return []
    return sorted((path for path in root.iterdir() if path.name.isdigit()), key=_number)


def prune(root: Path, keep: int) -> list[Path]:
    """Delete all but the newest `keep` checkpoints; returns what went. One rank calls it."""
    if keep < 1:
        raise ValueError(f"checkpoints {root}: keep = {keep}; at least 1")
    gone = list_checkpoints(root)[:-keep]
    for directory in gone:
        # Out of sight first: a reader must not meet a half-deleted checkpoint.
        hidden = directory.with_name(f".deleted-{directory.name}")
        directory.rename(hidden)
        shutil.rmtree(hidden)
    return gone


def find_fault(directory: Path) -> str:
    """What is wrong with a checkpoint's files, or "". The ranks share the reading."""
    listing = directory / FILES
    if not listing.is_file():
        return f"{FILES} is missing"
    try:
        files = json.loads(listing.read_text())
    except ValueError:
        return f"{FILES} is damaged"
    fault = ""
    for number, (name, (size, digest)) in enumerate(sorted(files.items())):
        if number % dist.get_world_size() != dist.get_rank() or fault:
            continue
        file = directory / name
        if not file.is_file():
            fault = f"{name} is missing"
        elif file.stat().st_size != size:
            fault = f"{name} has {file.stat().st_size} bytes, {size} were written"
        elif _sha256(file) != digest:
            fault = f"{name} has other content than was written"
    return next((one for one in gather(fault) if one), "")


def _refuse_foreign(tensors: dict[str, Any], directory: Path) -> None:
    saved = FileSystemReader(directory).read_metadata().state_dict_metadata
    for name, weight in tensors["model"].items():
        there = saved.get(f"model.{name}")
        shape = list(there.size) if there is not None else "nothing"  # type: ignore[union-attr]
        if shape != list(weight.shape):
            raise ArtifactError(
                f"checkpoint {directory}: {name} = {shape}; the model has {list(weight.shape)}: "
                "it was written by another model"
            )
    for name in tensors["optimizer"]:
        if f"optimizer.{name}.exp_avg" not in saved:
            raise ArtifactError(
                f"checkpoint {directory}: {name} was not trained there; give the same "
                "only_train_params and freeze_params"
            )


def _open_staging(directory: Path) -> Path:
    """An empty directory beside the final one; what a dead attempt left there goes."""
    staging = directory.with_name(f".writing-{directory.name}")
    if dist.get_rank() == 0:
        if directory.exists() and any(directory.iterdir()):
            raise ArtifactError(f"checkpoint {directory}: exists; write to a new name")
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(parents=True)
    dist.barrier()
    return staging


def _seal(staging: Path, directory: Path) -> None:
    """Hash this rank's files, list all of them, rename."""
    dist.barrier()
    mine = {}
    files = sorted(path for path in staging.iterdir() if path.is_file())
    for number, file in enumerate(files):
        if number % dist.get_world_size() == dist.get_rank():
            mine[file.name] = (file.stat().st_size, _sha256(file))
    listed = {name: entry for part in gather(mine) for name, entry in part.items()}
    if dist.get_rank() == 0:
        (staging / FILES).write_text(json.dumps(listed, indent=1, sort_keys=True))
        staging.rename(directory)
    dist.barrier()


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _number(path: Path) -> int:
    return int(path.name)
