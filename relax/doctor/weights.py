"""A model's weights by the headers of its files: are they whole, are they what config.json says."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from relax.errors import ArtifactError
from relax.model_dir import all_shapes, read_config

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


def check_weights(directory: Path) -> None:
    """ArtifactError unless the weights are whole and have the shapes that config.json asks for."""
    told, shapes = read_config(directory), all_shapes(directory)
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
