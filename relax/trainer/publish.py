"""Published weights: a Hugging Face directory, and one hash that says what is in it."""

import hashlib
import json
import shutil
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from relax.model_dir import INDEX, WEIGHTS
from relax.trainer.build import DTYPES
from relax.trainer.heads import LogpHead
from relax.trainer.model_files import ModelFiles
from relax.trainer.ranks import gather
from relax.trainer.sharded import ShardedModel

# A file is split off at this size; a rank holds one rank's share of them at a time.
FILE_BYTES = 4 * 2**30
HASH_THREADS = 8


def write(model: ShardedModel, directory: Path, dtype: str) -> str:
    """Write the model's weights, config.json and companions; returns policy_hash(directory).

    The directory is empty or not there; it is whole when this returns.
    """
    directory.mkdir(parents=True, exist_ok=True)
    file_of = assign_files(model, DTYPES[dtype])
    mine: dict[str, dict[str, Tensor]] = {}
    for name, tensor in _owned_tensors(model, DTYPES[dtype], file_of):
        mine.setdefault(file_of[name], {})[name] = tensor
    lines = [_line(name, tensor) for part in mine.values() for name, tensor in part.items()]
    for file, tensors in mine.items():
        save_file(tensors, directory / file, metadata={"format": "pt"})
    digest = _combine(gather(lines))
    if dist.get_rank() == 0:
        _write_companions(model, directory, dtype, file_of)
    dist.barrier()
    return digest


def weights_hash(model: ShardedModel, dtype: str) -> str:
    """policy_hash of what write would put down, without writing it."""
    file_of = assign_files(model, DTYPES[dtype])
    return _combine(
        gather([_line(*item) for item in _owned_tensors(model, DTYPES[dtype], file_of)])
    )


def policy_hash(directory: Path) -> str:
    """sha256 over one line per tensor, in name order: name, dtype, shape, sha256 of the bytes."""
    files = ModelFiles(Path(directory))
    with ThreadPoolExecutor(HASH_THREADS) as pool:  # sha256 and page faults hold no lock of Python
        return _combine(
            [list(pool.map(lambda name: _line(name, files.tensor(name)), files.names()))]
        )


def first_difference(model: ShardedModel, directory: Path, dtype: str) -> str:
    """ ": NAME differs first, by SIZE" of what write would put down against a published policy.

    SIZE is the largest absolute difference; empty when all are equal. Every rank calls it.
    """
    files = ModelFiles(Path(directory))
    for name, whole in _whole_tensors(model, DTYPES[dtype], assign_files(model, DTYPES[dtype])):
        ours, theirs = whole.cpu(), files.tensor(name)
        if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
            return f": {name} {list(ours.shape)} was {list(theirs.shape)}"
        if not torch.equal(ours, theirs):
            size = (ours.double() - theirs.double()).abs().max().item()
            return f": {name} differs first, by {size:.3g}"
    return ""


def assign_files(model: ShardedModel, dtype: torch.dtype) -> dict[str, str]:
    """Published tensor name -> file name: contiguous in name order, level, a multiple of ranks.

    A tied head is spelled out: engines that reload weights leave it stale where no file names it.
    """
    sizes = {name: weight.numel() * dtype.itemsize for name, weight in model.weights.items()}
    if model.module.is_tied:
        sizes[LogpHead.hf_name] = sizes[model.embedding_name]
    total = sum(sizes.values())
    num_files = -(-total // FILE_BYTES)
    if num_files > 1:
        num_files = -(-num_files // dist.get_world_size()) * dist.get_world_size()
    if num_files == 1:
        return dict.fromkeys(sorted(sizes), WEIGHTS)
    places, done = {}, 0
    for name in sorted(sizes):
        places[name] = min(num_files - 1, done * num_files // total)
        done += sizes[name]
    used = sorted(set(places.values()))
    return {
        name: f"model-{used.index(place) + 1:05d}-of-{len(used):05d}.safetensors"
        for name, place in places.items()
    }


def _owned_tensors(
    model: ShardedModel, dtype: torch.dtype, file_of: dict[str, str]
) -> Iterator[tuple[str, Tensor]]:
    """The tensors of this rank's files on the host: copies, never views of live parameters.

    Every rank joins every gather.
    """
    files = sorted(set(file_of.values()))
    for name, whole in _whole_tensors(model, dtype, file_of):
        if files.index(file_of[name]) % dist.get_world_size() == dist.get_rank():
            yield name, whole.to("cpu", copy=True).contiguous()


def _whole_tensors(
    model: ShardedModel, dtype: torch.dtype, names: Iterable[str]
) -> Iterator[tuple[str, Tensor]]:
    """Published tensors in name order, where the parameters are; maybe views of them."""
    for name in sorted(names):
        source = name if name in model.weights else model.embedding_name
        weight = model.weights[source].detach()
        # Rounding commutes with gathering, and halves what is sent.
        whole = weight.to(dtype)
        if isinstance(whole, DTensor):
            alone = whole.device_mesh.size() == 1
            whole = whole.to_local() if alone else whole.full_tensor()
        yield name, whole


def _line(name: str, tensor: Tensor) -> str:
    data = tensor.contiguous().view(torch.uint8).numpy().reshape(-1).data
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"{name} {dtype} {list(tensor.shape)} {hashlib.sha256(data).hexdigest()}\n"


def _combine(lines: list[list[str]]) -> str:
    """The hash of all ranks' lines in name order."""
    ordered = sorted((line for part in lines for line in part), key=lambda line: line.split(" ")[0])
    return hashlib.sha256("".join(ordered).encode()).hexdigest()


def _write_companions(
    model: ShardedModel, directory: Path, dtype: str, file_of: dict[str, str]
) -> None:
    for file in ModelFiles(model.model_dir).companions():
        shutil.copyfile(file, directory / file.name)
    described = {**model.described, "dtype": dtype}
    (directory / "config.json").write_text(json.dumps(described, indent=2, sort_keys=True) + "\n")
    if len(set(file_of.values())) > 1:
        itemsize = DTYPES[dtype].itemsize
        total = itemsize * sum(weight.numel() for weight in model.weights.values())
        index = {"metadata": {"total_size": total}, "weight_map": file_of}
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        (directory / INDEX).write_text(text)
