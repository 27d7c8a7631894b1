"""Arrow IPC files: written whole, checked against the schema when read, hashed by column bytes."""

from __future__ import annotations

import hashlib
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa

from relax.errors import ArtifactError
from relax.schema import Table


def write_table(path: Path, table: pa.Table) -> None:
    """Write `table` as one Arrow IPC file."""
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)


def read_table(path: Path, kind: Table) -> pa.Table:
    """The memory-mapped table in `path`; ArtifactError when it is damaged or not of this kind."""
    try:
        with pa.memory_map(str(path)) as source:
            table = pa.ipc.open_file(source).read_all()
    except FileNotFoundError:
        raise ArtifactError(f"{path}: missing; its manifest says that it should be here") from None
    except (pa.ArrowInvalid, OSError) as error:
        raise ArtifactError(f"{path}: truncated or not an Arrow file: {error}") from None
    if not table.schema.equals(kind.schema, check_metadata=True):
        raise ArtifactError(f"{path}: not a {kind.name} table:{_difference(table.schema, kind)}")
    return table


def rows(table: pa.Table) -> SimpleNamespace:
    """Columns by name: numpy arrays for numbers, lists for texts and lists of arrays for lists."""
    return SimpleNamespace(**{name: _column(table.column(name)) for name in table.column_names})


def content_hash(table: pa.Table) -> str:
    """sha256 over names, types and values; the same for any chunking, slicing or file layout."""
    digest = hashlib.sha256()
    for field in table.schema:
        digest.update(f"{field.name}:{field.type}:{field.nullable};".encode())
        _update(digest, table.column(field.name).combine_chunks())
    return digest.hexdigest()


def _update(digest: hashlib._Hash, array: pa.Array | pa.ChunkedArray) -> None:
    if isinstance(array, pa.ChunkedArray):
        array = pa.concat_arrays(array.chunks) if array.chunks else pa.array([], array.type)
    digest.update(len(array).to_bytes(8, "little"))
    digest.update(np.packbits(_numpy(array.is_valid())).tobytes())
    if pa.types.is_list(array.type):
        digest.update(_numpy(array.value_lengths().fill_null(0)).tobytes())
        _update(digest, array.flatten())
    elif pa.types.is_string(array.type):
        for text in array.to_pylist():
            encoded = (text or "").encode()
            digest.update(len(encoded).to_bytes(8, "little") + encoded)
    elif pa.types.is_boolean(array.type):
        digest.update(np.packbits(_numpy(array.fill_null(False))).tobytes())
    else:
        digest.update(np.ascontiguousarray(_numpy(array.fill_null(0))).tobytes())


def _numpy(array: pa.Array) -> np.ndarray:
    return array.to_numpy(zero_copy_only=False)


def _column(column: pa.ChunkedArray) -> np.ndarray | list:
    if pa.types.is_list(column.type):
        return [None if item is None else np.asarray(item) for item in _lists(column)]
    if pa.types.is_string(column.type):
        return column.to_pylist()
    return column.to_numpy()


def _lists(column: pa.ChunkedArray) -> list[np.ndarray | None]:
    """One numpy array per row, without a Python object per element."""
    out: list[np.ndarray | None] = []
    for chunk in column.chunks:
        offsets, values = chunk.offsets.to_numpy(), _numpy(chunk.values)
        valid = _numpy(chunk.is_valid())
        pairs = zip(offsets[:-1], offsets[1:], valid, strict=True)
        out += [values[a:b] if ok else None for a, b, ok in pairs]
    return out


def _difference(have: pa.Schema, want: Table) -> str:
    lines = []
    for field in want.schema:
        place = have.get_field_index(field.name)
        if place < 0:
            lines.append(f"missing {field.name}: {field.type}")
        elif not have.field(place).equals(field):
            lines.append(f"{field.name} is {have.field(place).type}, want {field.type}")
    lines += [f"unknown {name}" for name in have.names if name not in want.schema.names]
    if not lines:
        version = (have.metadata or {}).get(b"relax.version", b"none").decode()
        lines.append(f"schema version {version}; read it with the version that wrote it")
    return " " + "; ".join(lines)
