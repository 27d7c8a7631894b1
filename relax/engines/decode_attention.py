"""Attention of a decode step: the one query position of all heads that share a key, as rows.

transformers' own repeats keys and values for every query head, at each token of each layer.
"""

from typing import Any

from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "relax_decode"
TYPES = {
    "gemma", "granite", "llama", "ministral", "mistral", "mixtral", "olmo2", "phi3", "qwen2",
    "qwen2_moe", "qwen3", "qwen3_moe", "smollm3",
}  # fmt: skip
"""Model types that it is used for; a test runs each. Others may ask which attention they have."""


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **others: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: [B, heads, q, D] states to output [B, q, heads, D]."""
    is_one_mask = attention_mask is None or attention_mask.shape[1] == 1
    if query.shape[2] != 1 or others.get("position_bias") is not None or not is_one_mask:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **others)
    rows, heads, _, _ = query.shape
    folded = query.reshape(rows, key.shape[1], heads // key.shape[1], -1)
    output = scaled_dot_product_attention(
        folded, key, value, attn_mask=attention_mask, scale=others.get("scaling")
    )
    return output.reshape(rows, 1, heads, -1), None


def install(model: Any) -> None:
    """Use it in a model of TYPES that would use transformers' own."""
    if model.config.model_type in TYPES and model.config._attn_implementation == "sdpa":
        model.set_attn_implementation(NAME)


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, sdpa_mask)
