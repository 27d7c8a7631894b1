"""Published weights: a Hugging Face directory, and one hash that says what is in it."""

import hashlib
import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedConfig

from relax.errors import ArtifactError

HEAD = "lm_head.weight"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# What belongs to a model besides its weights and config.json.
COMPANIONS = ("*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken")


def full_tensors(
    weights: Mapping[str, nn.Parameter], dtype: torch.dtype, embedding: str
) -> Iterator[tuple[str, Tensor]]:
    """Whole tensors one after another in name order, on the CPU, on every rank.

    Copies, never views of live parameters. A tied head is spelled out: engines that reload
    weights leave the head stale where the file does not name it.
    """
    names = dict(weights) if HEAD in weights else {**weights, HEAD: weights[embedding]}
    for name in sorted(names):
        weight = names[name].detach()
        whole = weight.full_tensor() if isinstance(weight, DTensor) else weight
        yield name, whole.to("cpu", dtype, copy=True).contiguous()


def hash_tensors(tensors: Iterator[tuple[str, Tensor]]) -> str:
    """sha256 over one line per tensor, in name order: name, dtype, shape, sha256 of the bytes."""
    whole = hashlib.sha256()
    for name, tensor in tensors:
        data = tensor.contiguous().view(torch.uint8).numpy().reshape(-1).data
        dtype = str(tensor.dtype).removeprefix("torch.")
        line = f"{name} {dtype} {list(tensor.shape)} {hashlib.sha256(data).hexdigest()}\n"
        whole.update(line.encode())
    return whole.hexdigest()


def policy_hash(directory: Path) -> str:
    """The hash of a published directory: equal to Actor.weights_hash() of what was published."""
    return hash_tensors(_read_tensors(directory))


def first_difference(tensors: Iterator[tuple[str, Tensor]], directory: Path) -> str:
    """ ": NAME differs first, by SIZE" for the first of two lists of tensors that is not the same.

    SIZE is the largest absolute difference; empty when all are equal.
    """
    for (name, ours), (other, theirs) in zip(tensors, _read_tensors(directory), strict=False):
        if name != other or ours.shape != theirs.shape or ours.dtype != theirs.dtype:
            return f": {name} {list(ours.shape)} in the place of {other} {list(theirs.shape)}"
        if not torch.equal(ours, theirs):
            size = (ours.double() - theirs.double()).abs().max().item()
            return f": {name} differs first, by {size:.3g}"
    return ""


def _read_tensors(directory: Path) -> Iterator[tuple[str, Tensor]]:
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise ArtifactError(f"policy {directory}: no *.safetensors file; not a published policy")
    handles = [safe_open(file, framework="pt") for file in files]
    where = {name: handle for handle in handles for name in handle.keys()}  # noqa: SIM118
    for name in sorted(where):
        yield name, where[name].get_tensor(name)


def write_policy(
    tensors: Iterator[tuple[str, Tensor]],
    directory: Path,
    *,
    config: PreTrainedConfig,
    dtype: str,
    model_dir: Path,
) -> None:
    """Write weights, config.json and the model's tokenizer files into directory."""
    directory.mkdir(parents=True, exist_ok=True)
    for pattern in COMPANIONS:
        for file in model_dir.glob(pattern):
            if not file.name.endswith(".index.json") and file.name != "config.json":
                shutil.copyfile(file, directory / file.name)
    described = {**config.to_diff_dict(), "dtype": dtype}
    text = json.dumps(described, indent=2, sort_keys=True) + "\n"
    (directory / "config.json").write_text(text)
    save_file(dict(tensors), directory / "model.safetensors", metadata={"format": "pt"})
