import pytest
import torch

from relax.trainer import logprob
from relax.trainer.logprob import linear_logp, top_words


@pytest.fixture(params=[(4, 7), (64, 64)], ids=["tiled", "whole"])
def tile(request, monkeypatch):
    monkeypatch.setattr(logprob, "logit_tile", lambda *_: request.param)


def inputs():
    generator = torch.Generator().manual_seed(1)
    hidden_NH = torch.randn(11, 5, generator=generator)
    weight_VH = 3 * torch.randn(30, 5, generator=generator)
    return hidden_NH, weight_VH, torch.randint(0, 30, (11,), generator=generator)


def reference(hidden_NH, weight_VH, target_N, temperature):
    logp_NV = (hidden_NH @ weight_VH.T / temperature).log_softmax(-1)
    logp_N = logp_NV.gather(1, target_N[:, None])[:, 0]
    return logp_N, -(logp_NV.exp() * logp_NV).sum(-1)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("use", ["both", "logp", "entropy"])
def test_values_and_gradients_are_those_of_a_log_softmax(tile, temperature, use):
    hidden_NH, weight_VH, target_N = inputs()
    upstream = torch.randn(2, 11, generator=torch.Generator().manual_seed(2))
    upstream[{"both": [], "logp": [1], "entropy": [0]}[use]] = 0.0
    found = []
    for function, dtype in ((reference, torch.float64), (linear_logp, torch.float32)):
        hidden = hidden_NH.to(dtype, copy=True).requires_grad_()
        weight = weight_VH.to(dtype, copy=True).requires_grad_()
        outputs = function(hidden, weight, target_N, temperature)
        used = [(o, u.to(dtype)) for o, u in zip(outputs, upstream, strict=True) if u.any()]
        torch.autograd.backward([o for o, _ in used], [u for _, u in used])
        found.append([*outputs, hidden.grad, weight.grad])
    for exact, ours in zip(*found, strict=True):
        assert (ours - exact).norm() <= 5e-6 * exact.norm()


def test_golden_numbers(tile):
    hidden_NH = torch.tensor([[1.0]])
    weight_VH = torch.log(torch.tensor([[1.0], [2.0], [5.0]]))
    logp_N, entropy_N = linear_logp(hidden_NH, weight_VH, torch.tensor([1]), 1.0)
    assert logp_N.item() == pytest.approx(-1.38629436, rel=1e-6)  # log(2 / 8)
    assert entropy_N.item() == pytest.approx(0.90025583, rel=1e-6)


def test_large_logits_stay_finite(tile):
    hidden_NH, weight_VH, target_N = inputs()
    hidden_NH = (1e4 * hidden_NH).requires_grad_()
    logp_N, entropy_N = linear_logp(hidden_NH, weight_VH, target_N, 1.0)
    (logp_N + entropy_N).sum().backward()
    assert torch.isfinite(logp_N).all()
    assert torch.isfinite(entropy_N).all()
    assert torch.isfinite(hidden_NH.grad).all()


def test_a_frozen_head_gets_no_gradient(tile):
    hidden_NH, weight_VH, target_N = inputs()
    hidden_NH.requires_grad_()
    linear_logp(hidden_NH, weight_VH, target_N, 1.0)[0].sum().backward()
    expected = inputs()[0].requires_grad_()
    reference(expected, weight_VH, target_N, 1.0)[0].sum().backward()
    torch.testing.assert_close(hidden_NH.grad, expected.grad)
    assert weight_VH.grad is None


def test_likeliest_words(tile):
    hidden_NH, weight_VH, _ = inputs()
    word_NK = top_words(hidden_NH, weight_VH, 9)
    assert word_NK.dtype == torch.int32
    assert torch.equal(word_NK, (hidden_NH @ weight_VH.T).topk(9).indices.int())
