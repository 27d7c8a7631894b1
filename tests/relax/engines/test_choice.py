import numpy as np
import pytest
import torch

from relax.engines import choice
from relax.engines.protocol import SamplingParams

WEIGHT = [0.1, 0.0, 0.4, 0.2, 0.3, 0.0]


def draws(weight, uniform):
    rows = torch.tensor([weight] * len(uniform), dtype=torch.float64)
    return choice.inverse_cdf(rows, torch.tensor(uniform, dtype=torch.float64)).tolist()


def test_uniforms_are_a_function_of_seed_and_position():
    first = choice.uniforms([7, 2**63 - 1], 0)
    stream = np.random.Generator(np.random.Philox(key=7)).random(2 * choice.BLOCK)
    assert first[0].tolist() == stream[: choice.BLOCK].tolist()
    assert choice.uniforms([7], 1)[0].tolist() == stream[choice.BLOCK :].tolist()
    assert choice.uniforms([2**63 - 1, 7], 0)[0].tolist() == first[1].tolist()


def test_inverse_cdf_by_hand():
    assert draws(WEIGHT, [0.0, 0.0999, 0.1001, 0.4999, 0.5001, 0.6999, 0.7001]) == [
        0, 0, 2, 2, 3, 3, 4,
    ]  # fmt: skip


def test_inverse_cdf_never_returns_weight_zero():
    below_one = float(np.nextafter(1.0, 0.0))
    assert draws([0.0, 0.5, 0.0, 0.5, 0.0], [0.0, 0.5, below_one, 1.0]) == [1, 3, 3, 3]
    assert draws([0.0, 1e-300, 0.0], [0.0, below_one]) == [1, 1]


def test_truncated_by_hand():
    weight_BV = torch.tensor([WEIGHT], dtype=torch.float64)
    top_2 = choice.truncated(weight_BV, 2, 1.0)[0]
    assert top_2.tolist() == [0, 0, 0.4, 0, 0.3, 0]
    assert choice.truncated(weight_BV, 0, 0.69)[0].tolist() == [0, 0, 0.4, 0, 0.3, 0]
    assert choice.truncated(weight_BV, 0, 0.71)[0].tolist() == [0, 0, 0.4, 0.2, 0.3, 0]
    # The nucleus is of what top_k left: .4 / .7 = .571.
    assert choice.truncated(weight_BV, 2, 0.57)[0].tolist() == [0, 0, 0.4, 0, 0, 0]
    assert choice.truncated(weight_BV, 0, 1e-300)[0].tolist() == [0, 0, 0.4, 0, 0, 0]
    ties = torch.full((1, 4), 0.25, dtype=torch.float64)
    assert choice.truncated(ties, 2, 1.0)[0].tolist() == [0.25, 0.25, 0, 0]


def test_truncated_equals_a_plain_sort_on_a_flat_large_vocabulary():
    torch.manual_seed(0)
    weight_BV = (torch.randn(3, 9001).mul(0.1)).exp()
    weight_BV[1, 7:7000] = 0
    for top_p in (0.05, 0.5, 0.97):
        share_BV, order_BV = (weight_BV.double() / weight_BV.double().sum(-1, True)).sort(
            dim=-1, descending=True, stable=True
        )
        is_inside_BV = share_BV.cumsum(-1) - share_BV < top_p
        want_BV = torch.zeros_like(weight_BV).scatter(
            1, order_BV, weight_BV.gather(1, order_BV) * is_inside_BV
        )
        assert torch.equal(choice.truncated(weight_BV, 0, top_p), want_BV)


def test_two_level_search_equals_a_plain_one():
    torch.manual_seed(0)
    for vocab_size in (8 * choice.SPAN + 1, 9 * choice.SPAN, 9 * choice.SPAN + 77):
        weight_BV = torch.rand(2000, vocab_size) ** 8
        weight_BV[:, 100:3000] = 0
        weight_BV[1000:, -70:] = 0
        uniform_B = torch.rand(2000, dtype=torch.float64)
        uniform_B[::100] = 0
        token_B = choice.inverse_cdf(weight_BV, uniform_B)
        cdf_BV = weight_BV.double().cumsum(dim=-1)
        target_B1 = uniform_B[:, None] * cdf_BV[:, -1:]
        want_B = torch.searchsorted(cdf_BV, target_B1, right=True)[:, 0]
        assert token_B.tolist() == want_B.tolist()
        token_B = choice.inverse_cdf(weight_BV, torch.ones_like(uniform_B))
        assert (weight_BV.gather(1, token_B[:, None]) > 0).all()


def test_choose_reports_the_full_distribution():
    logits_BV = torch.tensor([[1.0, 2.0, 3.0, 0.5]]).repeat(64, 1)
    uniform_B = (torch.arange(64, dtype=torch.float64) + 0.5) / 64
    full = torch.log_softmax(logits_BV[0].double() / 0.7, dim=-1)
    for params in (
        SamplingParams(temperature=0.7),
        SamplingParams(temperature=0.7, top_k=2),
        SamplingParams(temperature=0.7, top_p=0.8),
    ):
        token_B, logp_B = choice.choose(logits_BV, uniform_B, params, [])
        assert torch.allclose(logp_B.double(), full[token_B], atol=1e-6)
        assert set(token_B.tolist()) == ({1, 2} if params.is_truncated else {0, 1, 2, 3})
    token_B, logp_B = choice.choose(logits_BV, uniform_B, SamplingParams(temperature=0.0), [])
    assert set(token_B.tolist()) == {2}
    assert logp_B[0].item() == pytest.approx(float(torch.log_softmax(logits_BV[0], -1)[2]))


def test_forbidden_tokens_even_where_they_hold_all_probability():
    logits_BV = torch.tensor([[500.0, 0.0, 1.0]]).repeat(8, 1)
    uniform_B = torch.linspace(0, 0.99, 8, dtype=torch.float64)
    token_B, logp_B = choice.choose(logits_BV, uniform_B, SamplingParams(), [0])
    assert set(token_B.tolist()) == {1, 2}
    assert logp_B.max().item() == pytest.approx(-499.0)
    assert choice.choose(logits_BV, uniform_B, SamplingParams(temperature=0), [0])[0][0] == 2


@pytest.mark.parametrize("vocab_size", [7, 9 * choice.SPAN])
def test_nan_logits_give_nan_logp_in_their_row_only(vocab_size):
    uniform_B = torch.tensor([0.5, 0.5], dtype=torch.float64)
    for changes in ({}, {"top_p": 0.5}, {"top_k": 3}, {"temperature": 0.0}):
        params = SamplingParams(**changes)
        logits_BV = torch.zeros(2, vocab_size)
        logits_BV[0, 3] = float("nan")
        logp_B = choice.choose(logits_BV, uniform_B, params, [])[1]
        assert logp_B.isnan().tolist() == [True, False]
        assert choice.choose(logits_BV.fill_(torch.nan), uniform_B, params, [])[1].isnan().all()


def test_frequencies_follow_the_distribution():
    weight_BV = torch.tensor([WEIGHT], dtype=torch.float64).expand(20_000, -1)
    uniform_B = torch.from_numpy(choice.uniforms(range(20_000), 0)[:, 3])
    counts = torch.bincount(choice.inverse_cdf(weight_BV, uniform_B), minlength=6) / 20_000
    assert torch.allclose(counts, torch.tensor(WEIGHT), atol=0.012)
