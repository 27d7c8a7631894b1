"""The manifest of a committed stage: what it holds, what it was made from, what it hashes to."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from relax.errors import ArtifactError

MANIFEST = "manifest.json"
FORMAT = 1


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class TableEntry(_Record):
    """One Arrow file of a stage."""

    bytes: int
    rows: int
    hash: str


class Published(_Record):
    """A directory that this manifest makes exist: a policy or a checkpoint."""

    name: str
    hash: str
    bytes: int


class Manifest(_Record):
    """What one attempt committed. `timing` is outside every hash."""

    format: int
    stage: str
    step: int
    key: str
    key_parts: dict[str, Any]
    attempt: str
    tables: dict[str, TableEntry]
    policy: Published | None
    checkpoint: Published | None
    notes: dict[str, Any]
    timing: list[tuple[str, float | None, str | None]]

    @property
    def content(self) -> str:
        """sha256 over what the stage computed: its tables and its policy.

        The checkpoint is a cache of the computation that made the policy, kept or not by
        settings that change no result, so it does not count.
        """
        parts = {name: entry.hash for name, entry in self.tables.items()}
        return digest({**parts, "policy": self.policy.hash if self.policy else None})

    @property
    def identity(self) -> str:
        """What state derived from this manifest is known by: what went in and what came out."""
        return f"{self.key}:{self.content}"

    def to_bytes(self) -> bytes:
        """The manifest as it stands on disk."""
        return (json.dumps(self.model_dump(), indent=1) + "\n").encode()


def digest(value: Any) -> str:
    """sha256 of a value's canonical JSON."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def read_manifest(directory: Path) -> Manifest | None:
    """The manifest in a stage's directory, None where there is none.

    Raises ArtifactError when it is damaged, of another format, or a table has another size.
    """
    path = directory / MANIFEST
    try:
        text = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        manifest = Manifest.model_validate_json(text)
    except ValidationError as error:
        fault = error.errors()[0]
        where = ".".join(str(p) for p in fault["loc"])
        raise ArtifactError(f"{path}: damaged: {where}: {fault['msg']}") from None
    if manifest.format != FORMAT:
        raise ArtifactError(f"{path}: format = {manifest.format}; this version reads {FORMAT}")
    check_sizes(directory, manifest)
    return manifest


def check_sizes(directory: Path, manifest: Manifest) -> None:
    """Raise ArtifactError when a table is missing or has not the size its manifest gives."""
    for name, entry in manifest.tables.items():
        path = directory / f"{name}.arrow"
        size = _size(path)
        if size != entry.bytes:
            raise ArtifactError(
                f"{path}: {'missing' if size is None else f'{size} bytes'}, the manifest says "
                f"{entry.bytes} bytes; restore the file, or remove {directory} to compute it again"
            )


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return None


def differences(old: dict[str, Any], new: dict[str, Any], prefix: str = "") -> list[str]:
    """What changed between two sets of key parts, one `name: old -> new` each."""
    lines = []
    for name in sorted(old.keys() | new.keys()):
        before, after = old.get(name), new.get(name)
        if isinstance(before, dict) and isinstance(after, dict):
            lines += differences(before, after, f"{prefix}{name}.")
        elif before != after:
            lines.append(f"{prefix}{name}: {_brief(before)} -> {_brief(after)}")
    return lines


def _brief(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 24 else text[:12] + ".." + text[-8:]
