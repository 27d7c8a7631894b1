"""Causal attention of each sequence, over tokens that sequences share.

All else in a transformer treats a token alone, so that a prompt which several responses follow
goes through the model once. Attention alone looks at sequences, and here each reads its own.

Shapes: L distinct tokens of a micro-batch, b sequences of a bucket, S tokens of its longest,
H query heads, K key/value heads, D head dimension.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig

from relax.trainer.device import folds_heads

NAME = "relax_causal"
BY_LAYER = {"qwen2", "qwen3", "smollm3"}
"""Model types whose layers attend as layer_types says, and plainly where it says so."""
ALIKE = {"granite", "llama", "mistral", "olmo2", "phi3"}
"""Model types whose layers all attend plainly, where no sliding_window is set."""

NOT_PLAIN = ("sliding_window", "softcap", "s_aux", "position_bias")
"""What a layer would hand its attention function if it were not plain."""

BUCKET_SLACK = 16
"""Sequences at most this much shorter than three quarters of the longest share its bucket."""


@dataclass(frozen=True, eq=False)
class Reading:
    """Which of the L tokens each sequence reads.

    bucket_bS: sequences of like length together; where one is shorter than S its own tokens come
    again from the first, which nothing before them sees. (One token alone many times would make its
    gradient a long serial sum on a CUDA device.) home_L: where each token's own attention is, in
    the flattened buckets laid end to end.
    """

    bucket_bS: tuple[Tensor, ...]
    home_L: Tensor


def is_plain(config: PreTrainedConfig) -> bool:
    """Whether every layer is plain causal attention over the whole sequence."""
    if config.model_type in BY_LAYER:
        return set(config.layer_types) == {"full_attention"}
    return config.model_type in ALIKE and getattr(config, "sliding_window", None) is None


def make_reading(tokens_B: Sequence[np.ndarray], num_tokens: int, device: torch.device) -> Reading:
    """From each sequence's indices into the L tokens, in order."""
    buckets: list[list[np.ndarray]] = []
    for tokens in sorted(tokens_B, key=len, reverse=True):
        if not buckets or len(tokens) < len(buckets[-1][0]) * 3 // 4 - BUCKET_SLACK:
            buckets.append([])
        buckets[-1].append(tokens)
    home_L = np.zeros(num_tokens, np.int64)
    padded, start = [], 0
    for bucket in buckets:
        index_bS = np.empty((len(bucket), len(bucket[0])), np.int64)
        for row, tokens in zip(index_bS, bucket, strict=True):
            row[:] = np.resize(tokens, len(row))
            home_L[tokens] = np.arange(start, start + len(tokens))
            start += len(row)
        padded.append(torch.from_numpy(index_bS).to(device))
    return Reading(tuple(padded), torch.from_numpy(home_L).to(device))


@torch.compiler.disable  # another number of buckets would compile the block again
def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    *,
    reading: Reading,
    scaling: float | None = None,
    **others: object,
) -> tuple[Tensor, None]:
    """transformers' attention interface: [1, H or K, L, D] states to output [1, L, H, D]."""
    assert not any(others.get(name) for name in NOT_PLAIN), others
    if not folds_heads(query):
        group = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    query_LHD, key_LKD, value_LKD = (states[0].transpose(0, 1) for states in (query, key, value))
    outputs = []
    for index_bS in reading.bucket_bS:
        query_bHSD, key_bKSD, value_bKSD = (
            states.index_select(0, index_bS.flatten()).unflatten(0, index_bS.shape).transpose(1, 2)
            for states in (query_LHD, key_LKD, value_LKD)
        )
        output_bHSD = scaled_dot_product_attention(
            query_bHSD, key_bKSD, value_bKSD, is_causal=True, scale=scaling, enable_gqa=True
        )
        outputs.append(output_bHSD.transpose(1, 2).flatten(0, 1))
    whole = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return whole.index_select(0, reading.home_L)[None], None


def _no_mask(*_: object, **__: object) -> None:
    """Masks are not made: a Reading says who sees whom."""


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, _no_mask)
