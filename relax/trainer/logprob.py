"""Log-probabilities and entropies from hidden states and head, never a whole [N, V] tensor.

Shapes: N response tokens, H hidden size, V vocabulary, n and v a tile of N and V.
"""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from relax.trainer.device import add_product, wide_logits, wider
from relax.trainer.tile import logit_tile


def linear_logp(
    hidden_NH: Tensor, weight_VH: Tensor, target_N: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """Log-probability of the target and entropy of softmax(hidden @ weight.T / temperature).

    Returns logp_N and entropy_N in nats, float32 (float64 from float64). Both are differentiable
    with respect to hidden and weight; the backward pass computes the logits again, tile by tile,
    from the saved log-sum-exp: with p = softmax(z) and H the entropy,
    d logp / d z = onehot(target) - p and d H / d z = -p (log p + H).
    """
    return _LinearLogp.apply(hidden_NH, weight_VH, target_N, temperature)


def top_words(hidden_NH: Tensor, weight_VH: Tensor, num_top: int) -> Tensor:
    """The num_top likeliest words, int32 [N, num_top], likeliest first; no gradient."""
    tile_tokens, tile_words = _tile_shape(hidden_NH, weight_VH)
    words = []
    for tokens in _tiles(len(hidden_NH), tile_tokens):
        hidden_nH = hidden_NH[tokens]
        best_nk = hidden_nH.new_empty((len(hidden_nH), 0), dtype=wider(hidden_nH))
        word_nk = torch.empty_like(best_nk, dtype=torch.int32)
        for tile in _tiles(len(weight_VH), tile_words):
            logits_nv = wide_logits(hidden_nH, weight_VH[tile])
            word_v = torch.arange(tile.start, tile.stop, dtype=torch.int32, device=hidden_nH.device)
            both_nv = torch.cat([best_nk, logits_nv], 1)
            word_nv = torch.cat([word_nk, word_v.expand(len(hidden_nH), -1)], 1)
            best_nk, place_nk = both_nv.topk(min(num_top, both_nv.shape[1]), dim=1)
            word_nk = word_nv.gather(1, place_nk)
        words.append(word_nk)
    return torch.cat(words)


class _LinearLogp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_NH, weight_VH, target_N, temperature):
        tile_tokens, _ = _tile_shape(hidden_NH, weight_VH)
        wide = wider(hidden_NH)
        logp_N = hidden_NH.new_empty(len(hidden_NH), dtype=wide)
        entropy_N = torch.empty_like(logp_N)
        lse_N = torch.empty_like(logp_N)
        for tokens in _tiles(len(hidden_NH), tile_tokens):
            lse_N[tokens], entropy_N[tokens] = _lse_and_entropy(
                hidden_NH[tokens], weight_VH, temperature
            )
            target_nH = weight_VH[target_N[tokens]]
            score_n = (hidden_NH[tokens].to(wide) * target_nH.to(wide)).sum(-1) / temperature
            logp_N[tokens] = score_n - lse_N[tokens]
        ctx.save_for_backward(hidden_NH, weight_VH, target_N, lse_N, entropy_N)
        ctx.temperature = temperature
        ctx.set_materialize_grads(False)
        return logp_N, entropy_N

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_logp_N, grad_entropy_N):
        hidden_NH, weight_VH, target_N, lse_N, entropy_N = ctx.saved_tensors
        if grad_logp_N is None:
            grad_logp_N = torch.zeros_like(lse_N)
        tile_tokens, tile_words = _tile_shape(hidden_NH, weight_VH)
        grad_hidden_NH = torch.zeros_like(hidden_NH, dtype=wider(hidden_NH))
        # A frozen head needs no gradient, and no memory for one.
        grad_weight_VH = None
        if ctx.needs_input_grad[1]:
            grad_weight_VH = torch.zeros_like(weight_VH, dtype=wider(weight_VH))
            grad_weight_VH.index_add_(0, target_N, grad_logp_N[:, None] * hidden_NH)
        for tokens in _tiles(len(hidden_NH), tile_tokens):
            hidden_nH, grad_logp_n = hidden_NH[tokens], grad_logp_N[tokens]
            for words in _tiles(len(weight_VH), tile_words):
                logp_nv = _logits(hidden_nH, weight_VH[words], ctx.temperature)
                logp_nv -= lse_N[tokens, None]
                if grad_entropy_N is None:
                    grad_nv = logp_nv.exp_().mul_(-grad_logp_n[:, None])
                else:
                    grad_entropy_n1 = grad_entropy_N[tokens, None]
                    offset_n1 = grad_logp_n[:, None] + grad_entropy_n1 * entropy_N[tokens, None]
                    p_nv = logp_nv.exp()
                    grad_nv = logp_nv.mul_(grad_entropy_n1).add_(offset_n1).neg_().mul_(p_nv)
                grad_nv = grad_nv.to(weight_VH.dtype)
                add_product(grad_hidden_NH[tokens], grad_nv, weight_VH[words])
                if grad_weight_VH is not None:
                    add_product(grad_weight_VH[words], grad_nv.T, hidden_nH)
            grad_hidden_NH[tokens] += grad_logp_n[:, None] * weight_VH[target_N[tokens]]
        grad_hidden_NH = (grad_hidden_NH / ctx.temperature).to(hidden_NH.dtype)
        if grad_weight_VH is not None:
            grad_weight_VH = grad_weight_VH.div_(ctx.temperature).to(weight_VH.dtype)
        return grad_hidden_NH, grad_weight_VH, None, None


def _lse_and_entropy(
    hidden_nH: Tensor, weight_VH: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """Log-sum-exp and entropy with a running maximum over vocabulary tiles.

    With m the maximum, s = sum(exp(z - m)) and w = sum(exp(z - m) (z - m)): H = log s - w / s.
    Shifted by m the two terms stay small where the distribution is peaked, and so does the error.
    """
    # Finite, unlike -inf: (max - new max) * 0 must be 0.
    max_n = hidden_nH.new_full((len(hidden_nH),), -1e30, dtype=wider(hidden_nH))
    sum_n = torch.zeros_like(max_n)
    weighted_n = torch.zeros_like(max_n)
    for words in _tiles(len(weight_VH), _tile_shape(hidden_nH, weight_VH)[1]):
        logits_nv = _logits(hidden_nH, weight_VH[words], temperature)
        new_max_n = torch.maximum(max_n, logits_nv.amax(-1))
        fall_n = max_n - new_max_n
        shrink_n = fall_n.exp()
        shifted_nv = logits_nv.sub_(new_max_n[:, None])
        exp_nv = shifted_nv.exp()
        weighted_n = shrink_n * (weighted_n + fall_n * sum_n) + shifted_nv.mul_(exp_nv).sum(-1)
        sum_n = shrink_n * sum_n + exp_nv.sum(-1)
        max_n = new_max_n
    log_sum_n = sum_n.log()
    return max_n + log_sum_n, log_sum_n - weighted_n / sum_n


def _logits(hidden_nH: Tensor, weight_vH: Tensor, temperature: float) -> Tensor:
    logits_nv = wide_logits(hidden_nH, weight_vH)
    return logits_nv if temperature == 1.0 else logits_nv.div_(temperature)


def _tile_shape(hidden_NH: Tensor, weight_VH: Tensor) -> tuple[int, int]:
    return logit_tile(len(hidden_NH), len(weight_VH), hidden_NH.device.type)


def _tiles(length: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, length)) for start in range(0, length, size)]
