"""What the engines ask of a policy's directory besides its weights: head, tokenizer, end tokens."""

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file

from relax.model_dir import INDEX, has_tokenizer, read_config, read_object, weight_files

HEAD = "lm_head.weight"
_COMPANIONS = {".json", ".jinja", ".model", ".py", ".tiktoken", ".txt"}
_METADATA = {"format": "pt"}


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
        if path.name != INDEX:
            (scratch / path.name).symlink_to(path.resolve())
    with safe_open(where[tables[0]], framework="pt") as file:
        save_file({HEAD: file.get_tensor(tables[0])}, scratch / "head.safetensors", _METADATA)
    names = {name: path.name for name, path in where.items()} | {HEAD: "head.safetensors"}
    (scratch / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": names}))
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
    named = read_object(generation_path).get("eos_token_id") if generation_path.is_file() else None
    if named is None:
        config = read_config(policy)
        named = config.get("eos_token_id", config.get("text_config", {}).get("eos_token_id"))
    ids = named if isinstance(named, list) else [named]
    if tokenizer is not None:
        ids = [*ids, tokenizer.eos_token_id]
    return tuple(sorted({int(x) for x in ids if x is not None}))


def load_tokenizer(policy: Path) -> Any | None:
    """The tokenizer published with `policy`, or None where there is none."""
    if not has_tokenizer(policy):
        return None
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(policy, local_files_only=True)
