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


def test_frequencies_follow_the_distribution():
    weight_BV = torch.tensor([WEIGHT], dtype=torch.float64).expand(20_000, -1)
    uniform_B = torch.from_numpy(choice.uniforms(range(20_000), 0)[:, 3])
    counts = torch.bincount(choice.inverse_cdf(weight_BV, uniform_B), minlength=6) / 20_000
    assert torch.allclose(counts, torch.tensor(WEIGHT), atol=0.012)
