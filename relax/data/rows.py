"""Reading prompt files: JSONL, Parquet, or a directory that Hugging Face datasets saved."""

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from relax.errors import ArtifactError, one_line

if TYPE_CHECKING:
    import pyarrow as pa

GSM8K_HINT = 'download GSM8K train.jsonl/test.jsonl, each line {"question","answer"}'
PARQUET_MAGIC = b"PAR1"


def read_rows(path: str | Path) -> list[dict[str, Any]]:
    """Read the rows of a prompt source in file order.

    A file that begins as Parquet does is read as Parquet, any other as JSONL (blank lines are
    skipped and not counted as rows); a directory as one saved by Dataset.save_to_disk.

    Raises ArtifactError when the source is missing, empty, or damaged (naming file and line).
    """
    path = existing(path)
    if path.is_dir():
        rows = read_saved_dataset(path)
    elif path.stat().st_size == 0:
        raise ArtifactError(f"{path}: the file is empty; one JSON object a line is needed")
    elif path.suffix == ".parquet" or read_head(path) == PARQUET_MAGIC:
        rows = read_parquet(path)
    else:
        rows = read_jsonl(path)
    if not rows:
        raise ArtifactError(f"{path}: holds no rows; at least one prompt is needed")
    return rows


def content_hash(path: str | Path) -> str:
    """Give the sha256 of a file's bytes, in hex; of a directory, over its sorted files.

    Each file of a directory counts as its name in the directory, NUL, its size as 8 big-endian
    bytes, then its bytes. Raises ArtifactError when the path does not exist.
    """
    path = existing(path)
    if path.is_file():
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    total = hashlib.sha256()
    files = {file.relative_to(path).as_posix(): file for file in path.rglob("*") if file.is_file()}
    for name in sorted(files):
        total.update(name.encode() + b"\0" + files[name].stat().st_size.to_bytes(8, "big"))
        with files[name].open("rb") as file:
            while block := file.read(1 << 20):
                total.update(block)
    return total.hexdigest()


def existing(path: str | Path) -> Path:
    """Give the path, or raise ArtifactError that says what to put there."""
    path = Path(path)
    if path.exists():
        return path
    remedy = GSM8K_HINT if "gsm8k" in str(path).lower() else "a JSONL or Parquet file is needed"
    raise ArtifactError(f"{path}: no such file or directory; {remedy}")


def read_head(path: Path) -> bytes:
    """Read the first four bytes, where formats put their magic number."""
    with path.open("rb") as file:
        return file.read(len(PARQUET_MAGIC))


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Read one JSON object a line; lines end at newline only, since U+2028 may occur in strings."""
    with path.open("rb") as file:
        return [
            parse_line(line, f"{path}:{number}")
            for number, line in enumerate(file, start=1)
            if line.strip()
        ]


def parse_line(line: bytes, where: str) -> dict[str, Any]:
    """Parse one line of JSONL; where is "file:line" for the error."""
    try:
        row = json.loads(line.rstrip(b"\r\n").decode("utf-8-sig"))
    except json.JSONDecodeError as error:
        raise ArtifactError(
            f"{where}: not JSON: {error.msg.removesuffix(' at')} at column {error.colno}; "
            "one JSON object a line is needed"
        ) from error
    except UnicodeDecodeError as error:
        raise ArtifactError(
            f"{where}: not UTF-8: {error.reason} at byte {error.start + 1}; "
            "plain (not compressed) JSONL is needed"
        ) from error
    except (RecursionError, ValueError) as error:
        raise ArtifactError(f"{where}: not usable JSON: {error}") from error
    if not isinstance(row, dict):
        raise ArtifactError(
            f"{where}: a JSON {type(row).__name__}; one JSON object a line is needed"
        )
    return row


def read_parquet(path: Path) -> list[dict[str, Any]]:
    """Read a Parquet file; a damaged one is an ArtifactError."""
    import pyarrow as pa
    import pyarrow.parquet

    try:
        return pyarrow.parquet.ParquetFile(path).read().to_pylist()
    except (pa.ArrowInvalid, OSError) as error:
        raise ArtifactError(f"{path}: not a whole Parquet file: {one_line(error)}") from error


def read_saved_dataset(path: Path) -> list[dict[str, Any]]:
    """Read the Arrow stream files of a directory saved by Dataset.save_to_disk, in its order."""
    if (path / "dataset_dict.json").exists():
        splits = ", ".join(sorted(entry.name for entry in path.iterdir() if entry.is_dir()))
        raise ArtifactError(f"{path}: holds several splits; name the directory of one of: {splits}")
    files = dataset_files(path)
    if not files:
        raise ArtifactError(
            f"{path}: no *.arrow files; a directory saved by Dataset.save_to_disk is needed, "
            "or name a JSONL or Parquet file itself"
        )
    return [row for file in files for row in read_stream(file).to_pylist()]


def dataset_files(path: Path) -> list[Path]:
    """List the data files as state.json orders them; without one, all *.arrow files by name."""
    state = path / "state.json"
    if not state.exists():
        return sorted(path.glob("*.arrow"))
    try:
        return [path / entry["filename"] for entry in json.loads(state.read_text())["_data_files"]]
    except (ValueError, KeyError, TypeError) as error:
        raise ArtifactError(
            f"{state}: does not list _data_files; save the data set again"
        ) from error


def read_stream(path: Path) -> "pa.Table":
    """Read one Arrow IPC stream file; a missing or damaged one is an ArtifactError."""
    import pyarrow as pa

    try:
        with pa.memory_map(str(path)) as source:
            return pa.ipc.open_stream(source).read_all()
    except (pa.ArrowInvalid, OSError) as error:
        raise ArtifactError(f"{path}: not a whole Arrow stream: {one_line(error)}") from error
