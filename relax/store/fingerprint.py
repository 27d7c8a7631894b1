"""What a model directory holds, without reading all of its weights."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

from relax.model_dir import check_tokenizer, read_config, read_header, weight_files

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
    "spiece.model",
)
"""All that text becomes tokens by, in the order of the hash."""


def model_fingerprint(directory: str | Path) -> str:
    """sha256 over config.json and the headers and sizes of the safetensors files.

    Raises ArtifactError for a directory that is not a model in Hugging Face layout.
    """
    directory = Path(directory)
    read_config(directory)
    digest = hashlib.sha256((directory / "config.json").read_bytes())
    for path in weight_files(directory):
        digest.update(f"{path.name}:{path.stat().st_size}:".encode() + _sampled(path))
    return digest.hexdigest()


def tokenizer_hash(directory: str | Path) -> str:
    """sha256 over the tokenizer's files; ArtifactError where there are none."""
    directory = Path(directory)
    check_tokenizer(directory)
    return _digest(directory / name for name in TOKENIZER_FILES if (directory / name).exists())


def _digest(paths: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        digest.update(f"{path.name}:{path.stat().st_size}:".encode() + path.read_bytes())
    return digest.hexdigest()


def _sampled(path: Path) -> bytes:
    """The header of a safetensors file, and a sample of its data."""
    parts = [read_header(path)]
    start = 8 + len(parts[0])
    with path.open("rb") as file:
        for place in range(8):
            file.seek(start + (path.stat().st_size - start) * place // 8)
            parts.append(file.read(4096))
    return hashlib.sha256(b"".join(parts)).digest()
