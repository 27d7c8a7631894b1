"""Choosing a token: counter-based uniforms and the inverse CDF of the sampled distribution.

Shape letters: B rows of the batch, V vocabulary, T response positions.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from relax.engines.protocol import SamplingParams

# Uniforms are drawn in blocks of this many positions (a multiple of Philox's four a counter).
BLOCK = 256


def uniforms(seeds: Sequence[int], block: int) -> np.ndarray:
    """uniform_BT in [0, 1), float64, for response positions [block * BLOCK, (block + 1) * BLOCK).

    Entry (b, t) is a function of (seeds[b], position) alone: Philox 4x64 keyed by the seed, the
    position as counter (Salmon et al., 2011, doi:10.1145/2063384.2063405).
    """
    uniform_BT = np.empty((len(seeds), BLOCK))
    for row, seed in enumerate(seeds):
        stream = np.random.Philox(key=seed, counter=block * (BLOCK // 4))
        uniform_BT[row] = np.random.Generator(stream).random(BLOCK)
    return uniform_BT


def choose(
    logits_BV: Tensor, uniform_B: Tensor, params: SamplingParams, forbidden_ids: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Choose one token a row: (token_B int64, logp_B float32).

    logp = log_softmax(logits / temperature)[token] over the full vocabulary, in float32. The token
    is argmax for temperature 0, else the inverse CDF in float64 at `uniform_B` of the same softmax
    without `forbidden_ids`, then cut to `top_k` and `top_p`. A token of probability 0 is never
    returned. NaN logits give NaN logp.
    """
    logits_BV = logits_BV.float()
    if params.temperature not in (0, 1):
        logits_BV = logits_BV / params.temperature
    logp_BV = torch.log_softmax(logits_BV, dim=-1)
    allowed_BV = logp_BV
    if forbidden_ids:
        ids = torch.tensor(forbidden_ids, device=logits_BV.device)
        allowed_BV = torch.log_softmax(logits_BV.index_fill(1, ids, -torch.inf), dim=-1)
    if params.temperature == 0:
        token_B = allowed_BV.argmax(dim=-1)
    else:
        weight_BV = allowed_BV.double().exp_()
        if params.is_truncated:
            weight_BV = truncated(weight_BV, params.top_k, params.top_p)
        token_B = inverse_cdf(weight_BV, uniform_B)
    return token_B, logp_BV.gather(1, token_B[:, None])[:, 0]


def truncated(weight_BV: Tensor, top_k: int, top_p: float) -> Tensor:
    """Zero all but the `top_k` largest weights (0: all), then all but the nucleus of `top_p`.

    The nucleus is the smallest set of largest weights whose share of what top_k left is >= top_p
    (Holtzman et al., arXiv:1904.09751). Ties are cut in vocabulary order.
    """
    sorted_BV, order_BV = weight_BV.sort(dim=-1, descending=True, stable=True)
    if 0 < top_k < sorted_BV.shape[-1]:
        sorted_BV[:, top_k:] = 0
    if top_p < 1:
        cumulative_BV = sorted_BV.cumsum(dim=-1)
        before_BV = cumulative_BV - sorted_BV
        # The largest weight always stays, whatever rounding does to a tiny top_p.
        outside_BV = before_BV >= top_p * cumulative_BV[:, -1:]
        outside_BV[:, 0] = False
        sorted_BV = sorted_BV.masked_fill(outside_BV, 0)
    return torch.zeros_like(weight_BV).scatter_(1, order_BV, sorted_BV)


def inverse_cdf(weight_BV: Tensor, uniform_B: Tensor) -> Tensor:
    """First token whose cumulative weight exceeds uniform * total; never one of weight 0."""
    cdf_BV = weight_BV.cumsum(dim=-1)
    total_B1 = cdf_BV[:, -1:].contiguous()
    token_B1 = torch.searchsorted(cdf_BV, uniform_B[:, None] * total_B1, right=True)
    # uniform * total can round up to the total: the last token of non-zero weight is meant then.
    last_B1 = torch.searchsorted(cdf_BV, total_B1)
    return torch.minimum(token_B1, last_B1)[:, 0].clamp_(max=weight_BV.shape[-1] - 1)
