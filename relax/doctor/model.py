"""The size of a model, from its config.json alone; exact where its weights are there to count."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from relax.errors import ArtifactError
from relax.model_dir import all_shapes, read_config

SHAPE = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "vocab_size",
    "intermediate_size",
)


@dataclass(frozen=True)
class ModelSize:
    """A decoder's shape and its number of parameters."""

    architecture: str
    hidden_size: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    tied: bool
    """Whether the head is the embedding."""
    context_len: int
    num_parameters: int
    counted: bool
    """True where the weights' headers gave the number, False where it follows from the shape."""

    @property
    def num_embedded(self) -> int:
        """Parameters of the embedding, and as many has the head."""
        return self.vocab_size * self.hidden_size

    @property
    def num_outside_blocks(self) -> int:
        """Parameters of embedding and head."""
        return self.num_embedded * (1 if self.tied else 2)

    @property
    def num_per_block(self) -> int:
        """Parameters of one block."""
        return (self.num_parameters - self.num_outside_blocks) // self.num_layers

    @property
    def num_published(self) -> int:
        """Numbers in a published policy, where a tied head is spelled out."""
        return self.num_parameters + (self.num_embedded if self.tied else 0)

    @property
    def cache_values_per_token(self) -> int:
        """Numbers that the key-value cache holds for one token."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim


def model_size(directory: str | Path) -> ModelSize:
    """The size of the model in `directory`; ArtifactError when its config.json does not say."""
    path = Path(directory) / "config.json"
    told = read_config(Path(directory))
    missing = [name for name in SHAPE if name not in told]
    if missing:
        raise ArtifactError(f"{path}: has no {', '.join(missing)}; the size cannot be told")
    heads = told["num_attention_heads"]
    kv_heads = told.get("num_key_value_heads", heads)
    head_dim = told.get("head_dim") or told["hidden_size"] // heads
    tied = bool(told.get("tie_word_embeddings"))
    counted = count_weights(Path(directory), tied)
    return ModelSize(
        architecture=(told.get("architectures") or ["?"])[0],
        hidden_size=told["hidden_size"],
        num_layers=told["num_hidden_layers"],
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=told["vocab_size"],
        tied=tied,
        context_len=told.get("max_position_embeddings", 0),
        num_parameters=counted or estimate(told, heads, kv_heads, head_dim),
        counted=counted > 0,
    )


def estimate(told: dict, heads: int, kv_heads: int, head_dim: int) -> int:
    """Parameters of a decoder with gated MLP: embedding, attention, MLP, norms and head."""
    hidden, inner = told["hidden_size"], told["intermediate_size"]
    attention = hidden * head_dim * (2 * heads + 2 * kv_heads)
    layer = attention + 3 * hidden * inner + 2 * hidden + 2 * head_dim
    embedding = told["vocab_size"] * hidden
    ends = embedding if told.get("tie_word_embeddings") else 2 * embedding
    return ends + told["num_hidden_layers"] * layer + hidden


def count_weights(directory: Path, tied: bool) -> int:
    """Parameters by the headers of the safetensors files, a tied head once; 0 without files."""
    shapes = all_shapes(directory) if any(directory.glob("*.safetensors")) else {}
    if tied:
        shapes.pop("lm_head.weight", None)
    return sum(math.prod(shape) for shape in shapes.values())
