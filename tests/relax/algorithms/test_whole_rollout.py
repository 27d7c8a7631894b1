"""Advantages of a whole rollout: the order of their making, and what each row is given."""

import math

import pytest
import torch

from relax.algorithms import ALGORITHMS
from relax.algorithms.whole_rollout import complete_groups, compute
from relax.config import AlgorithmSection

NAN = math.nan


def settings(**given):
    return AlgorithmSection(**given).model_dump()


def batch(**changed):
    """Group of two: rewards 3 and 1, with two and one valid tokens."""
    return {
        "reward_B": torch.tensor([3.0, 1.0]),
        "group_id_B": torch.tensor([7, 7]),
        "mask_BT": torch.tensor([[1.0, 1.0], [1.0, 0.0]]),
        "rollout_logp_BT": torch.tensor([[-1.0, -2.0], [-3.0, NAN]]),
        "teacher_logp_BT": torch.tensor([[-2.0, -2.0], [-1.0, NAN]]),
        "old_logp_BT": torch.tensor([[-1.0, -2.0], [-3.0, NAN]]),
        "ref_logp_BT": torch.tensor([[-1.5, -2.0], [-2.0, NAN]]),
        "value_BT": torch.tensor([[0.5, 1.0], [0.0, NAN]]),
    } | changed


def close(found, wanted):
    torch.testing.assert_close(found, torch.tensor(wanted), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "given", "wanted"),
    [
        ("grpo", {}, [0.7071063, -0.7071063]),
        ("grpo", {"disable_grpo_std_normalization": True}, [1.0, -1.0]),
        ("grpo", {"disable_rewards_normalization": True}, [3.0, 1.0]),
        ("dr_grpo", {}, [1.0, -1.0]),
        ("rloo", {}, [2.0, -2.0]),
    ],
)
def test_one_scalar_a_response_is_broadcast(name, given, wanted):
    found = compute(ALGORITHMS[name], batch(), settings(**given))
    first, second = wanted
    close(found.advantage_BT, [[first, first], [second, 0.0]])
    assert found.per_response and found.return_BT is None


def test_normalize_advantages_whitens_over_valid_tokens():
    """Tokens 1, 1, -1: mean 1/3, unbiased variance 4/3."""
    row = ALGORITHMS["gspo"]
    given = {"disable_grpo_std_normalization": True, "normalize_advantages": True}
    found = compute(row, batch(), settings(**given))
    root = math.sqrt(4 / 3)
    close(found.advantage_BT, [[2 / 3 / root] * 2, [-4 / 3 / root, 0]])
    close(found.base_BT, [[1.0, 1.0], [-1.0, 0.0]])
    assert found.per_response


def test_reinforce_plus_plus_baseline_whitens_by_the_population():
    given = settings(normalize_advantages=True)
    found = compute(ALGORITHMS["reinforce_plus_plus_baseline"], batch(), given)
    root = math.sqrt(8 / 9)
    close(found.advantage_BT, [[2 / 3 / root] * 2, [-4 / 3 / root, 0]])


def test_reinforce_plus_plus():
    given = settings(kl_coef=0.1, gamma=0.5, normalize_advantages=True)
    found = compute(ALGORITHMS["reinforce_plus_plus"], batch(), given)
    # kl .5, 0, -1: returns .5 * 3 - .05, 3, 1 + .1
    close(found.base_BT, [[1.45, 3.0], [1.1, 0.0]])
    mean = (1.45 + 3 + 1.1) / 3
    root = math.sqrt(((1.45 - mean) ** 2 + (3 - mean) ** 2 + (1.1 - mean) ** 2) / 3)
    wanted = [[(1.45 - mean) / root, (3 - mean) / root], [(1.1 - mean) / root, 0.0]]
    close(found.advantage_BT, wanted)
    assert not found.per_response


def test_use_rollout_logprobs_takes_the_place_of_old_logp_in_the_kl_of_the_reward():
    changed = batch(rollout_logp_BT=torch.tensor([[-1.5, -2.0], [-2.0, NAN]]))
    given = settings(kl_coef=0.1, use_rollout_logprobs=True)
    found = compute(ALGORITHMS["reinforce_plus_plus"], changed, given)
    close(found.base_BT, [[3.0, 3.0], [1.0, 0.0]])


def test_ppo_with_and_without_kl_in_the_reward():
    """delta = r + V' - V: .5, 2; 1. With kl: -.05, then the others as before; 1.1."""
    found = compute(ALGORITHMS["ppo"], batch(), settings(lambd=0.5))
    close(found.advantage_BT, [[1.5, 2.0], [1.0, 0.0]])
    close(found.return_BT, [[2.0, 3.0], [1.0, 0.0]])
    found = compute(ALGORITHMS["ppo"], batch(), settings(lambd=0.5, kl_coef=0.1))
    close(found.advantage_BT, [[1.45, 2.0], [1.1, 0.0]])


def test_distillation_comes_after_the_base_and_before_whitening():
    given = {"disable_grpo_std_normalization": True, "use_opd": True, "opd_kl_coef": 0.5}
    found = compute(ALGORITHMS["grpo"], batch(), settings(**given))
    # rollout - teacher: 1, 0; -2
    close(found.advantage_BT, [[0.5, 1.0], [0.0, 0.0]])
    assert not found.per_response
    only = compute(ALGORITHMS["grpo"], batch(), settings(**given, opd_only_reward=True))
    close(only.advantage_BT, [[-0.5, 0.0], [1.0, 0.0]])
    white = compute(ALGORITHMS["grpo"], batch(), settings(**given, normalize_advantages=True))
    close(white.base_BT, [[0.5, 1.0], [0.0, 0.0]])
    close(white.advantage_BT, [[0.0, 1.0], [-1.0, 0.0]])


def test_returns_of_ppo_are_untouched_by_distillation_and_whitening():
    plain = compute(ALGORITHMS["ppo"], batch(), settings())
    changed = {"use_opd": True, "opd_only_reward": True, "normalize_advantages": True}
    found = compute(ALGORITHMS["ppo"], batch(), settings(**changed))
    assert torch.equal(found.return_BT, plain.return_BT)
    assert not torch.equal(found.advantage_BT, plain.advantage_BT)


def test_whitening_is_over_the_whole_rollout():
    """Whitening halves apart gives other numbers: it must not be left to the optimizer step."""
    generator = torch.Generator().manual_seed(0)
    whole = {
        "reward_B": torch.rand(8, generator=generator),
        "group_id_B": torch.arange(8) // 2,
        "mask_BT": torch.ones(8, 3),
    }
    given = settings(normalize_advantages=True)
    row = ALGORITHMS["reinforce_plus_plus_baseline"]
    together = compute(row, whole, given).advantage_BT
    first = compute(row, {name: x[:4] for name, x in whole.items()}, given).advantage_BT
    assert abs(together.double().mean().item()) < 1e-6
    assert together.double().std(correction=0).item() == pytest.approx(1.0, abs=1e-6)
    assert not torch.allclose(together[:4], first, atol=1e-3)


def test_a_row_without_whitening_refuses_it():
    with pytest.raises(ValueError, match="normalize_advantages = True: rloo has no whitening"):
        compute(ALGORITHMS["rloo"], batch(), settings(normalize_advantages=True))


def test_an_advantage_of_the_users_own():
    def per_response(reward_B, group_id_B, mask_BT, gamma=1.0):
        return reward_B * gamma

    def per_token(reward_B, group_id_B, mask_BT):
        return reward_B[:, None] + torch.tensor([[0.0, 1.0], [2.0, NAN]])

    row = ALGORITHMS["grpo"]
    found = compute(row, batch(), settings(gamma=0.5), per_response)
    close(found.advantage_BT, [[1.5, 1.5], [0.5, 0.0]])
    found = compute(row, batch(), settings(), per_token)
    close(found.advantage_BT, [[3.0, 4.0], [3.0, 0.0]])
    assert not found.per_response


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda reward_B, group_id_B, mask_BT: reward_B[:1], r"gave \(1,\); .* B or B, T"),
        (lambda reward_B, group_id_B, mask_BT: [1.0, 2.0], "gave list"),
        (lambda reward_B, group_id_B, mask_BT: reward_B / 0, "not finite"),
    ],
)
def test_an_advantage_of_the_users_own_that_is_wrong(function, words):
    with pytest.raises(ValueError, match=words):
        compute(ALGORITHMS["grpo"], batch(), settings(), function)


def test_complete_groups():
    group_id_B = torch.tensor([5, 3, 5, 3, 9, 3])
    assert complete_groups(group_id_B, 2).tolist() == [True, False, True, False, False, False]
