"""A model in Hugging Face layout by its small parts: config.json, the index, the files' headers.

No weights are read, and torch is not needed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from relax.errors import ArtifactError

AGAIN = "copy the model again (a policy of a run: `relax export` it again)"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
"""Files that a tokenizer is made from; one of them is enough."""

Shapes = dict[str, list[int]]
"""Tensor name -> shape."""


def read_config(directory: Path) -> dict[str, Any]:
    """config.json; ArtifactError where there is none or it is damaged."""
    if not directory.is_dir():
        raise ArtifactError(
            f"{directory}: no such directory; a model in Hugging Face layout is needed "
            "(hub names are not downloaded: fetch a snapshot first)"
        )
    return read_object(directory / "config.json")


def has_tokenizer(directory: Path) -> bool:
    """Whether a tokenizer lies in the directory."""
    return any((directory / name).is_file() for name in VOCABULARIES)


def check_tokenizer(directory: Path) -> None:
    """ArtifactError where no tokenizer lies in the directory."""
    if not has_tokenizer(directory):
        raise ArtifactError(
            f"{directory}: no tokenizer; looked for {', '.join(VOCABULARIES)}: "
            "copy the model's tokenizer files there"
        )


def weight_files(directory: Path) -> dict[Path, Shapes]:
    """The safetensors files that the index names, or all where there is none, and what they hold.

    Raises:
        ArtifactError: no file, a missing or truncated one, or a tensor that the index promises
            and its file lacks.
    """
    index = directory / INDEX
    if not index.is_file():
        found = sorted(directory.glob("*.safetensors"))
        if not found:
            raise ArtifactError(
                f"{directory}: no *.safetensors; save the model with save_pretrained"
            )
        return {path: read_shapes(path) for path in found}
    promised = _promised(index)
    files = {path: read_shapes(path) for path in promised}
    for path, shapes in files.items():
        if lacking := sorted(promised[path] - shapes.keys()):
            raise ArtifactError(f"{path}: tensor {lacking[0]} is in the index but not in the file")
    return files


def all_shapes(directory: Path) -> Shapes:
    """The tensors of all files of a model."""
    return {
        name: shape for shapes in weight_files(directory).values() for name, shape in shapes.items()
    }


def read_shapes(path: Path) -> Shapes:
    """The tensors of one safetensors file; ArtifactError unless it is as long as they are."""
    raw = read_header(path)
    try:
        header = json.loads(raw)
    except ValueError:
        raise ArtifactError(f"{path}: its header is damaged; {AGAIN}") from None
    header.pop("__metadata__", None)
    end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
    size, wanted = path.stat().st_size, 8 + len(raw) + end
    if size != wanted:
        raise ArtifactError(f"{path}: {size} bytes, its header says {wanted}: truncated; {AGAIN}")
    return {name: entry["shape"] for name, entry in header.items()}


def read_header(path: Path) -> bytes:
    """The header of a safetensors file, as JSON: it follows 8 bytes, its little-endian length."""
    if not path.is_file():
        raise ArtifactError(f"{path}: missing; {AGAIN}")
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > size - 8:
            raise ArtifactError(f"{path}: truncated or not a safetensors file; {AGAIN}")
        return file.read(length)


def read_object(path: Path) -> dict[str, Any]:
    """A JSON object of a model directory; ArtifactError where it is missing or damaged."""
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ArtifactError(
            f"{path}: missing; a model in Hugging Face layout is needed; {AGAIN}"
        ) from None
    except (ValueError, OSError) as error:
        raise ArtifactError(f"{path}: damaged: {error}; {AGAIN}") from None
    if not isinstance(content, dict):
        raise ArtifactError(f"{path}: damaged: not a JSON object; {AGAIN}")
    return content


def _promised(index: Path) -> dict[Path, set[str]]:
    where = read_object(index).get("weight_map")
    if not isinstance(where, dict) or not where:
        raise ArtifactError(f"{index}: damaged: no weight_map; {AGAIN}")
    promised: dict[Path, set[str]] = {}
    for tensor, file in where.items():
        promised.setdefault(index.with_name(str(file)), set()).add(tensor)
    return promised
