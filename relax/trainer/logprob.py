"""Log-probabilities and entropies from hidden states and head, never a whole [N, V] tensor.

Shapes: N response tokens, H hidden size, V vocabulary, n and v a tile of N and V.
"""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

# One tile of logits and one scratch tile of the same size stay in the second-level cache.
TILE_TOKENS = 256
TILE_WORDS = 1024


def linear_logp(
    hidden_NH: Tensor, weight_VH: Tensor, target_N: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """Log-probability of the target and entropy of softmax(hidden @ weight.T / temperature).

    Returns float32 logp_N and entropy_N (nats). Both are differentiable with respect to hidden
    and weight; the backward pass computes the logits again, tile by tile, from the saved
    log-sum-exp: with p = softmax(z) and H the entropy,
    d logp / d z = onehot(target) - p and d H / d z = -p (log p + H).
    """
    return _LinearLogp.apply(hidden_NH, weight_VH, target_N, temperature)


class _LinearLogp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_NH, weight_VH, target_N, temperature):
        num_tokens = len(hidden_NH)
        logp_N = hidden_NH.new_empty(num_tokens, dtype=torch.float32)
        entropy_N = torch.empty_like(logp_N)
        lse_N = torch.empty_like(logp_N)
        for tokens in _tiles(num_tokens, TILE_TOKENS):
            lse_N[tokens], entropy_N[tokens] = _lse_and_entropy(
                hidden_NH[tokens], weight_VH, temperature
            )
            target_nH = weight_VH[target_N[tokens]]
            score_n = (hidden_NH[tokens].float() * target_nH.float()).sum(-1) / temperature
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
        grad_hidden_NH = torch.zeros_like(hidden_NH, dtype=torch.float32)
        grad_weight_VH = torch.zeros_like(weight_VH, dtype=torch.float32)
        for tokens in _tiles(len(hidden_NH), TILE_TOKENS):
            hidden_nH, grad_logp_n = hidden_NH[tokens], grad_logp_N[tokens]
            for words in _tiles(len(weight_VH), TILE_WORDS):
                logp_nv = _logits(hidden_nH, weight_VH[words], ctx.temperature)
                logp_nv -= lse_N[tokens, None]
                if grad_entropy_N is None:
                    grad_nv = logp_nv.exp_().mul_(-grad_logp_n[:, None])
                else:
                    grad_entropy_n1 = grad_entropy_N[tokens, None]
                    offset_n1 = grad_logp_n[:, None] + grad_entropy_n1 * entropy_N[tokens, None]
                    p_nv = logp_nv.exp()
                    grad_nv = logp_nv.mul_(grad_entropy_n1).add_(offset_n1).neg_().mul_(p_nv)
                grad_hidden_NH[tokens] += grad_nv.to(weight_VH.dtype) @ weight_VH[words]
                grad_weight_VH[words] += grad_nv.to(hidden_nH.dtype).T @ hidden_nH
            grad_hidden_NH[tokens] += grad_logp_n[:, None] * weight_VH[target_N[tokens]]
        grad_weight_VH.index_add_(0, target_N, grad_logp_N[:, None] * hidden_NH)
        grad_hidden_NH /= ctx.temperature
        grad_weight_VH /= ctx.temperature
        return grad_hidden_NH.to(hidden_NH.dtype), grad_weight_VH.to(weight_VH.dtype), None, None


def _lse_and_entropy(
    hidden_nH: Tensor, weight_VH: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """Log-sum-exp and entropy with a running maximum over vocabulary tiles.

    H = lse - sum(exp(z - m) z) / sum(exp(z - m)).
    """
    max_n = hidden_nH.new_full((len(hidden_nH),), -torch.inf, dtype=torch.float32)
    sum_n = torch.zeros_like(max_n)
    weighted_n = torch.zeros_like(max_n)
    for words in _tiles(len(weight_VH), TILE_WORDS):
        logits_nv = _logits(hidden_nH, weight_VH[words], temperature)
        new_max_n = torch.maximum(max_n, logits_nv.amax(-1))
        shrink_n = (max_n - new_max_n).exp_()
        exp_nv = (logits_nv - new_max_n[:, None]).exp_()
        sum_n = sum_n * shrink_n + exp_nv.sum(-1)
        weighted_n = weighted_n * shrink_n + exp_nv.mul_(logits_nv).sum(-1)
        max_n = new_max_n
    lse_n = max_n + sum_n.log()
    return lse_n, lse_n - weighted_n / sum_n


def _logits(hidden_nH: Tensor, weight_vH: Tensor, temperature: float) -> Tensor:
    logits_nv = (hidden_nH @ weight_vH.T).float()
    return logits_nv if temperature == 1.0 else logits_nv.div_(temperature)


def _tiles(length: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, length)) for start in range(0, length, size)]
