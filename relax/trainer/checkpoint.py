"""The trainer's state on disk: torch.distributed.checkpoint, checked, resharded on load.

A checkpoint is a directory with DCP's files and, written last, files.json with their sizes and
sha256.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
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
from relax.trainer.ranks import from_first, gather

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


def begin_save(state: State, directory: Path, *, in_background: bool = False) -> Callable[[], str]:
    """Write into an empty directory; what it returns finishes that, and gives the content hash.

    In the background a thread writes a copy of the state, made before this returns. Every rank
    calls both.
    """
    if not in_background:
        dcp_save(state.tensors(), checkpoint_id=directory)
        return partial(_seal, directory)
    # A group of its own: the thread's collectives must not meet those of the caller.
    group = cast(dist.ProcessGroup, dist.new_group(backend="gloo"))
    writing = dcp_async_save(state.tensors(), checkpoint_id=directory, process_group=group)
    assert isinstance(writing, Future)

    def finish() -> str:
        writing.result()
        dist.destroy_process_group(group)
        return _seal(directory)

    return finish


def restore(state: State, directory: Path) -> tuple[int, int]:
    """Fill the live tensors; returns step and skips in a row. `find_fault` tells damage before."""
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


def find_fault(directory: Path) -> str:
    """What is wrong with a checkpoint's files, or "". The ranks share the reading."""
    mine = fault_of_share(directory, dist.get_rank(), dist.get_world_size())
    return next((fault for fault in gather(mine) if fault), "")


def fault_of_share(directory: Path, rank: int, num_ranks: int) -> str:
    """What is wrong with a rank's share of a checkpoint's files, or ""."""
    listing = directory / FILES
    if not listing.is_file():
        return f"{FILES} is missing"
    try:
        files = json.loads(listing.read_text())
    except ValueError:
        return f"{FILES} is damaged"
    for name, (size, digest) in sorted(files.items())[rank::num_ranks]:
        file = directory / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != size:
            return f"{name} has {file.stat().st_size} bytes, {size} were written"
        if _sha256(file) != digest:
            return f"{name} has other content than was written"
    return ""


def content_hash(directory: Path) -> str:
    """What a save returned: the hash of the list of files, which holds a hash of each."""
    listing = directory / FILES
    return _sha256(listing) if listing.is_file() else ""


def combined_hash(parts: Mapping[str, str]) -> str:
    """The hash of a directory of checkpoints, from name -> content_hash of each."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def checked_hash(directory: Path) -> str:
    """combined_hash of what lies in a directory of checkpoints; damage is an ArtifactError."""
    parts = {path.name: content_hash(path) for path in directory.iterdir() if path.is_dir()}
    for name in sorted(parts):
        if fault := fault_of_share(directory / name, 0, 1):
            raise ArtifactError(f"{name}/{fault}")
    return combined_hash(parts)


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
                "only_train_params_name_list and freeze_params_name_list"
            )


def _seal(directory: Path) -> str:
    """Hash this rank's share of the files and list those of all ranks."""
    dist.barrier()
    # Rank 0 wrote here last: over NFS the others may list what was there before.
    names = from_first(sorted(path.name for path in directory.iterdir()))
    share = [directory / name for name in names[dist.get_rank() :: dist.get_world_size()]]
    parts = gather({file.name: (file.stat().st_size, _sha256(file)) for file in share})
    if dist.get_rank() == 0:
        listed = {name: entry for part in parts for name, entry in part.items()}
        (directory / FILES).write_text(json.dumps(listed, indent=1, sort_keys=True))
    dist.barrier()
    return content_hash(directory)


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
