"""A model's weights by the headers of its files: are they whole, are they what config.json says.

Nothing is loaded, and torch is not needed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from relax.errors import ArtifactError

AGAIN = "copy the model again"
INDEX = "model.safetensors.index.json"
PLAIN = {"granite", "llama", "mistral", "olmo2", "phi3", "qwen2", "qwen3", "smollm3"}
"""Model types whose weights have the names and shapes below, where they have them at all."""
SHAPES: dict[str, tuple[str, ...]] = {
    "embed_tokens.weight": ("vocab_size", "hidden_size"),
    "lm_head.weight": ("vocab_size", "hidden_size"),
    "self_attn.q_proj.weight": ("query", "hidden_size"),
    "self_attn.k_proj.weight": ("key", "hidden_size"),
    "self_attn.v_proj.weight": ("key", "hidden_size"),
    "self_attn.o_proj.weight": ("hidden_size", "query"),
    "mlp.gate_proj.weight": ("intermediate_size", "hidden_size"),
    "mlp.up_proj.weight": ("intermediate_size", "hidden_size"),
    "mlp.down_proj.weight": ("hidden_size", "intermediate_size"),
}
LAYER = re.compile(r"\.layers\.(\d+)\.")


def read_config(directory: Path) -> dict[str, Any]:
    """config.json; ArtifactError where it is missing or damaged."""
    path = directory / "config.json"
    try:
        told = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ArtifactError(f"{path}: missing; a model in Hugging Face layout is needed") from None
    except (ValueError, OSError) as error:
        raise ArtifactError(f"{path}: damaged: {error}; {AGAIN}") from None
    if not isinstance(told, dict):
        raise ArtifactError(f"{path}: damaged: not a JSON object; {AGAIN}")
    return told


def read_shapes(directory: Path) -> dict[str, list[int]]:
    """Tensor name -> shape; {} without files. ArtifactError for a file that is not whole."""
    shapes: dict[str, list[int]] = {}
    for path in sorted(directory.glob("*.safetensors")):
        shapes |= {name: told["shape"] for name, told in _header(path).items()}
    return shapes


def _header(path: Path) -> dict[str, Any]:
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > size - 8:
            raise ArtifactError(f"{path}: truncated or not a safetensors file; {AGAIN}")
        try:
            header = json.loads(file.read(length))
        except ValueError:
            raise ArtifactError(f"{path}: its header is damaged; {AGAIN}") from None
    header.pop("__metadata__", None)
    wanted = 8 + length + max((told["data_offsets"][1] for told in header.values()), default=0)
    if size != wanted:
        raise ArtifactError(f"{path}: {size} bytes, its header says {wanted}: truncated; {AGAIN}")
    return header


def check_weights(directory: Path) -> None:
    """ArtifactError unless the weights are whole and have the shapes that config.json asks for."""
    if not directory.is_dir():
        raise ArtifactError(
            f"{directory}: no such directory; a model in Hugging Face layout is needed "
            "(hub names are not downloaded: fetch a snapshot first)"
        )
    told, shapes = read_config(directory), read_shapes(directory)
    if not shapes:
        raise ArtifactError(f"{directory}: no *.safetensors; save the model with save_pretrained")
    _check_shards(directory)
    if told.get("model_type") not in PLAIN or "quantization_config" in told:
        return
    sizes = _sizes(told)
    for name, shape in shapes.items():
        kind = next((kind for kind in SHAPES if name.endswith(f".{kind}") or name == kind), None)
        wanted = [sizes.get(size) for size in SHAPES[kind]] if kind else [None]
        if None not in wanted and shape != wanted:
            raise ArtifactError(
                f"{directory}: tensor {name} has shape {shape}; config.json wants {wanted}: "
                "one of the two is of another model"
            )
    there = {int(found[1]) for name in shapes if (found := LAYER.search(name))}
    if missing := sorted(set(range(told.get("num_hidden_layers", 0))) - there):
        raise ArtifactError(
            f"{directory}: no weights of layer {missing[0]}; config.json says num_hidden_layers = "
            f"{told['num_hidden_layers']}: one of the two is of another model"
        )


def _sizes(told: Mapping[str, Any]) -> dict[str, int | None]:
    """The lengths that shapes are made of; None for those that config.json leaves open."""
    heads, hidden = told.get("num_attention_heads"), told.get("hidden_size")
    size = told.get("head_dim") or (hidden // heads if heads and hidden else None)
    kv_heads = told.get("num_key_value_heads")
    return {
        **{name: told.get(name) for name in ("vocab_size", "hidden_size", "intermediate_size")},
        "query": heads * size if heads and size else None,
        "key": kv_heads * size if kv_heads and size else None,
    }


def _check_shards(directory: Path) -> None:
    """Every file that the index names must be there."""
    index = directory / INDEX
    if not index.exists():
        return
    try:
        files = set(json.loads(index.read_bytes())["weight_map"].values())
    except (ValueError, KeyError, AttributeError):
        raise ArtifactError(f"{index}: damaged; {AGAIN}") from None
    if missing := sorted(name for name in files if not (directory / name).exists()):
        raise ArtifactError(f"{directory}: {missing[0]} is missing; {AGAIN}")
