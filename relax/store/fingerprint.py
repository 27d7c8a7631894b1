"""What a model directory holds, without reading all of its weights."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

from relax.errors import ArtifactError

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
)
WEIGHT_FILES = ("model.safetensors", "model.safetensors.index.json")


def model_fingerprint(directory: str | Path) -> str:
    """sha256 over config.json and the headers and sizes of the safetensors files.

    Raises ArtifactError for a directory that is not a model in Hugging Face layout.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise ArtifactError(
            f"{directory}: no such directory; a model in Hugging Face layout is needed "
            "(hub names are not downloaded: fetch a snapshot first)"
        )
    if not (directory / "config.json").exists():
        raise ArtifactError(f"{directory}: no config.json; a Hugging Face model is needed")
    weights = sorted(directory.glob("*.safetensors"))
    if not weights:
        raise ArtifactError(f"{directory}: no *.safetensors; save the model with save_pretrained")
    digest = hashlib.sha256((directory / "config.json").read_bytes())
    for path in weights:
        digest.update(f"{path.name}:{path.stat().st_size}:".encode() + _header(path))
    return digest.hexdigest()


def tokenizer_hash(directory: str | Path) -> str:
    """sha256 over the tokenizer's files; ArtifactError where there are none."""
    directory = Path(directory)
    present = [directory / name for name in TOKENIZER_FILES if (directory / name).exists()]
    if not any(p.name not in ("tokenizer_config.json", "chat_template.jinja") for p in present):
        raise ArtifactError(
            f"{directory}: no tokenizer; looked for {', '.join(TOKENIZER_FILES)}; "
            "copy the tokenizer's files beside the model"
        )
    return _digest(present)


def _digest(paths: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        digest.update(f"{path.name}:{path.stat().st_size}:".encode() + path.read_bytes())
    return digest.hexdigest()


def _header(path: Path) -> bytes:
    """The JSON header of a safetensors file, and a sample of its data."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        size = path.stat().st_size
        if length > size - 8:
            raise ArtifactError(f"{path}: truncated or not a safetensors file")
        header = file.read(length)
        parts = [header]
        for place in range(8):
            file.seek(8 + length + (size - 8 - length) * place // 8)
            parts.append(file.read(4096))
    return hashlib.sha256(b"".join(parts)).digest()
