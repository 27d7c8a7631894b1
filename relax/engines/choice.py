"""Choosing a token: counter-based uniforms and the inverse CDF of the sampled distribution.

Shape letters: B rows of the batch, V vocabulary, T response positions, K largest weights,
S spans of the vocabulary, N weights of all rows together.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from relax.engines.protocol import SamplingParams

# Uniforms are drawn in blocks of this many positions (a multiple of Philox's four a counter).
BLOCK = 256
# Tokens in a span of the two-level search of a large vocabulary.
SPAN = 512


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

    logp = log_softmax(logits / temperature)[token] over the full vocabulary. The token is argmax
    for temperature 0 (logp is that of temperature 1), else the inverse CDF at `uniform_B` of the
    same softmax without `forbidden_ids`, then cut to `top_k` and `top_p`. A token of probability 0
    is never returned. NaN logits give NaN logp.
    """
    logits_BV = logits_BV.float()
    if params.temperature not in (0, 1):
        logits_BV = logits_BV / params.temperature
    peak_B1, weight_BV = _weights(logits_BV)
    total_B1 = weight_BV.sum(dim=-1, keepdim=True, dtype=torch.float64)
    allowed_BV = logits_BV
    if forbidden_ids:
        ids = torch.tensor(forbidden_ids, device=logits_BV.device)
        allowed_BV = logits_BV.index_fill(1, ids, -torch.inf)
        weight_BV = _weights(allowed_BV)[1]
    if params.temperature == 0:
        token_B = allowed_BV.argmax(dim=-1)
    else:
        if params.is_truncated:
            weight_BV = truncated(weight_BV, params.top_k, params.top_p)
        token_B = inverse_cdf(weight_BV, uniform_B)
    chosen_B1 = logits_BV.gather(1, token_B[:, None])
    logp_B1 = (chosen_B1 - peak_B1).double() - total_B1.log()
    return token_B, logp_B1[:, 0].float()


def _weights(logits_BV: Tensor) -> tuple[Tensor, Tensor]:
    """(peak_B1, weight_BV) with weight = exp(logits - peak), proportional to the softmax."""
    peak_B1 = logits_BV.amax(dim=-1, keepdim=True)
    return peak_B1, (logits_BV - peak_B1).exp_()


def truncated(weight_BV: Tensor, top_k: int, top_p: float) -> Tensor:
    """Zero all but the `top_k` largest weights (0: all), then all but the nucleus of `top_p`.

    The nucleus is the smallest set of largest weights whose share of what top_k left is >= top_p
    (Holtzman et al., arXiv:1904.09751). Ties are cut in vocabulary order.
    """
    total_B1 = weight_BV.sum(dim=-1, keepdim=True, dtype=torch.float64)
    if top_k:
        largest_BK = weight_BV.topk(min(top_k, weight_BV.shape[-1]), dim=-1).values.double()
        total_B1 = largest_BK.sum(dim=-1, keepdim=True)
    else:
        # All weights below this share together are less than 1 - top_p: none is in the nucleus.
        least_B1 = (1 - top_p) * total_B1 / weight_BV.shape[-1]
        largest_BK = _sorted_above(weight_BV, least_B1.to(weight_BV.dtype)).double()
    is_inside_BK = _cumsum(largest_BK) - largest_BK < top_p * total_B1
    if top_p == 1:
        is_inside_BK = torch.ones_like(is_inside_BK)
    # The largest weight always stays, whatever rounding does to a tiny top_p.
    num_kept_B1 = is_inside_BK.sum(dim=-1, keepdim=True).clamp(min=1)
    least_B1 = largest_BK.gather(1, num_kept_B1 - 1).to(weight_BV.dtype)
    is_kept_BV = weight_BV >= least_B1
    if (is_kept_BV.sum(dim=-1, keepdim=True) > num_kept_B1).any():
        is_above_BV = weight_BV > least_B1
        num_tied_B1 = num_kept_B1 - is_above_BV.sum(dim=-1, keepdim=True)
        is_tied_BV = weight_BV == least_B1
        is_kept_BV = is_above_BV | (is_tied_BV & (is_tied_BV.cumsum(dim=-1) <= num_tied_B1))
    return weight_BV.masked_fill(~is_kept_BV, 0)


def _sorted_above(weight_BV: Tensor, least_B1: Tensor) -> Tensor:
    """The weights >= least, descending, padded with 0: largest_BK. A full sort takes seconds."""
    row_N, token_N = (weight_BV >= least_B1).nonzero(as_tuple=True)
    count_B = torch.bincount(row_N, minlength=len(weight_BV))
    start_B = count_B.cumsum(0) - count_B
    column_N = torch.arange(len(row_N), device=row_N.device) - start_B[row_N]
    largest_BK = weight_BV.new_zeros(len(weight_BV), max(1, int(count_B.max())))
    largest_BK[row_N, column_N] = weight_BV[row_N, token_N]
    return largest_BK.sort(dim=-1, descending=True).values


def inverse_cdf(weight_BV: Tensor, uniform_B: Tensor) -> Tensor:
    """First token whose cumulative weight exceeds uniform * total; never one of weight 0.

    Sums are in float64. A large vocabulary is searched in two levels, spans first.
    """
    vocab_size = weight_BV.shape[-1]
    if vocab_size <= 8 * SPAN:
        cdf_BV = _cumsum(weight_BV.double())
        return _first_above(cdf_BV, uniform_B[:, None] * cdf_BV[:, -1:])[:, 0]
    num_spans = vocab_size // SPAN
    head_BSV = weight_BV[:, : num_spans * SPAN].unflatten(1, (num_spans, SPAN))
    tail_BV = weight_BV[:, num_spans * SPAN :]
    sums = [head_BSV.sum(-1, dtype=torch.float64), tail_BV.sum(-1, True, dtype=torch.float64)]
    cdf_BS = _cumsum(torch.cat(sums, dim=1))
    target_B1 = uniform_B[:, None] * cdf_BS[:, -1:]
    span_B1 = _first_above(cdf_BS, target_B1)
    before_B1 = cdf_BS.gather(1, (span_B1 - 1).clamp(min=0)).masked_fill(span_B1 == 0, 0)
    token_BV = span_B1 * SPAN + torch.arange(SPAN, device=weight_BV.device)
    inside_BV = weight_BV.gather(1, token_BV.clamp(max=vocab_size - 1)).double()
    inside_BV.masked_fill_(token_BV >= vocab_size, 0)
    offset_B1 = _first_above(_cumsum(inside_BV), target_B1 - before_B1)
    return (span_B1 * SPAN + offset_B1)[:, 0].clamp_(max=vocab_size - 1)


def _cumsum(weight_BV: Tensor) -> Tensor:
    """Cumulative sums along the last axis; on the host, a GPU has no deterministic ones."""
    return weight_BV.cpu().cumsum(dim=-1).to(weight_BV.device)


def _first_above(cdf_BV: Tensor, target_B1: Tensor) -> Tensor:
    """First index whose cdf exceeds the target, at most the last index that adds to the cdf."""
    found_B1 = torch.searchsorted(cdf_BV, target_B1, right=True)
    # Rounding can lift the target to the total: the last token of non-zero weight is meant then.
    last_B1 = torch.searchsorted(cdf_BV, cdf_BV[:, -1:].contiguous())
    return torch.minimum(found_B1, last_B1).clamp_(max=cdf_BV.shape[-1] - 1)
