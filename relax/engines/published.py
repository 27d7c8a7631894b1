"""A published policy directory (Hugging Face layout, safetensors): is it whole, where does it end.

Reads headers; weights are left to the engines.
"""

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file

from relax.errors import ArtifactError

AGAIN = "copy the model again (a policy of a run: `relax export` it again)"
HEAD = "lm_head.weight"
_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_COMPANIONS = {".json", ".jinja", ".model", ".py", ".tiktoken", ".txt"}
_METADATA = {"format": "pt"}


def weight_files(policy: Path) -> dict[Path, frozenset[str]]:
    """Check that `policy` is whole and map each of its safetensors files to its tensors' names.

    Raises:
        ArtifactError: no directory, no readable config.json, a missing shard, a truncated file,
            or a tensor that the index promises and its shard lacks.
    """
    read_config(policy)
    index_path = policy / _INDEX
    if not index_path.is_file():
        return {policy / _WEIGHTS: frozenset(_tensor_names(policy / _WEIGHTS))}
    promised: dict[str, set[str]] = {}
    for tensor, shard in _read_json(index_path).get("weight_map", {}).items():
        promised.setdefault(shard, set()).add(tensor)
    if not promised:
        raise ArtifactError(f"{index_path}: weight_map is empty; {AGAIN}")
    found = {policy / shard: frozenset(_tensor_names(policy / shard)) for shard in promised}
    for path, names in found.items():
        if lacking := sorted(promised[path.name] - names):
            raise ArtifactError(f"{path}: tensor {lacking[0]} is in the index but not in the shard")
    return found


def read_config(policy: Path) -> dict[str, Any]:
    """Read config.json of `policy`; ArtifactError where there is none."""
    if not policy.is_dir():
        raise ArtifactError(f"policy: {policy} is not a directory; name a published policy")
    return _read_json(policy / "config.json")


def with_explicit_head(policy: Path, directory: Path) -> Path:
    """`policy`, or `directory` with links to its files and a tied head as a tensor of its own.

    A live vLLM server keeps its old head where the files that it reloads name none.
    """
    files, config = weight_files(policy), read_config(policy)
    where = {name: path for path, names in files.items() for name in names}
    tables = [name for name in where if name.endswith("embed_tokens.weight")]
    is_tied = config.get("text_config", config).get("tie_word_embeddings", True)
    if HEAD in where or not is_tied or len(tables) != 1:
        return policy
    if directory.is_dir():
        return directory
    scratch = directory.with_name(f".{directory.name}-{os.getpid()}")
    scratch.mkdir(parents=True)
    for path in policy.iterdir():
        if path.name != _INDEX:
            (scratch / path.name).symlink_to(path.resolve())
    with safe_open(where[tables[0]], framework="pt") as file:
        save_file({HEAD: file.get_tensor(tables[0])}, scratch / "head.safetensors", _METADATA)
    names = {name: path.name for name, path in where.items()} | {HEAD: "head.safetensors"}
    (scratch / _INDEX).write_text(json.dumps({"metadata": {}, "weight_map": names}))
    try:
        scratch.rename(directory)
    except OSError:
        if not directory.is_dir():
            raise
        shutil.rmtree(scratch)  # another process was first
    return directory


def companions_digest(policy: Path) -> str:
    """sha256 over all that config, tokenizer and chat templates are read from, names and bytes."""
    digest = hashlib.sha256()
    for path in sorted(p for p in policy.rglob("*") if p.suffix in _COMPANIONS and p.is_file()):
        with path.open("rb") as file:
            own = hashlib.file_digest(file, "sha256").hexdigest()
        digest.update(f"{path.relative_to(policy)} {own}\n".encode())
    return digest.hexdigest()


def same_architecture(config: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two config.json describe the same modules: weights can be swapped in place."""
    notes = {"transformers_version", "_name_or_path", "dtype", "torch_dtype"}
    return {k: v for k, v in config.items() if k not in notes} == {
        k: v for k, v in other.items() if k not in notes
    }


def context_len(config: dict[str, Any]) -> int:
    """The model's own limit on prompt + response, in tokens; 0 where config.json names none."""
    text = config.get("text_config", config)
    for key in ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"):
        if text.get(key):
            return int(text[key])
    return 0


def end_token_ids(policy: Path, tokenizer: Any | None) -> tuple[int, ...]:
    """The model's end tokens: generation_config.json's, else config.json's; and the tokenizer's."""
    generation_path = policy / "generation_config.json"
    named = _read_json(generation_path).get("eos_token_id") if generation_path.is_file() else None
    if named is None:
        config = read_config(policy)
        named = config.get("eos_token_id", config.get("text_config", {}).get("eos_token_id"))
    ids = named if isinstance(named, list) else [named]
    if tokenizer is not None:
        ids = [*ids, tokenizer.eos_token_id]
    return tuple(sorted({int(x) for x in ids if x is not None}))


def has_tokenizer(policy: Path) -> bool:
    """Whether a tokenizer was published with the weights."""
    names = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
    return any((policy / name).is_file() for name in names)


def load_tokenizer(policy: Path) -> Any | None:
    """The tokenizer published with `policy`, or None where there is none."""
    if not has_tokenizer(policy):
        return None
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(policy, local_files_only=True)


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ArtifactError(f"{path}: missing; the policy is not whole, {AGAIN}")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ArtifactError(f"{path}: not JSON ({error}); {AGAIN}") from error
    if not isinstance(content, dict):
        raise ArtifactError(f"{path}: holds no JSON object; {AGAIN}")
    return content


def _tensor_names(path: Path) -> list[str]:
    """Names in a safetensors header, after checking the file's size against it.

    Format: 8 bytes little-endian header length, JSON header with data_offsets, data.
    """
    if not path.is_file():
        raise ArtifactError(f"{path}: missing; the policy is not whole, {AGAIN}")
    size = path.stat().st_size
    with path.open("rb") as file:
        header_len = int.from_bytes(file.read(8), "little")
        if size < 8 or 8 + header_len > size:
            raise ArtifactError(f"{path}: truncated at {size} bytes, inside its header")
        try:
            header = json.loads(file.read(header_len))
        except ValueError as error:
            raise ArtifactError(f"{path}: not a safetensors file ({error})") from error
    header.pop("__metadata__", None)
    end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
    if 8 + header_len + end != size:
        raise ArtifactError(
            f"{path}: has {size} bytes, its header promises {8 + header_len + end}; {AGAIN}"
        )
    return list(header)
