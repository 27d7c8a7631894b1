"""Metrics of a whole rollout, by hand."""

import pytest
import torch

from relax.algorithms import ALGORITHMS, metrics
from relax.algorithms.whole_rollout import compute
from relax.config import AlgorithmSection


def rloo(reward, group_id, tokens, *, size=3, lengths=None):
    width = max(tokens, default=0)
    mask_BT = torch.arange(width) < torch.tensor(tokens)[:, None]
    found = metrics.leave_one_out_metrics(
        torch.tensor(reward),
        torch.tensor(group_id),
        mask_BT,
        group_size=size,
        response_len_B=torch.tensor(lengths or tokens),
    )
    return {name.removeprefix("rollout/rloo/"): value for name, value in found.items()}


def test_rloo_golden():
    found = rloo([0.0, 1, 2, 3, 3, 3], [0, 0, 0, 1, 1, 1], [4, 1, 2, 1, 1, 1])
    assert found == pytest.approx(
        {
            "baseline_mean": 2.0,
            "adv_abs_mean": 0.5,
            "zero_adv_group_frac": 0.5,
            "no_signal_frac": 0.4,
            "empty_response_frac": 0.0,
            "dropped_group_frac": 0.0,
        }
    )


def test_rloo_leaves_incomplete_groups_out_and_counts_them():
    found = rloo([0.0, 1, 2, 9, 9], [4, 4, 4, 5, 5], [4, 0, 2, 8, 8], lengths=[4, 0, 2, 8, 0])
    assert found["baseline_mean"] == 1.0 and found["dropped_group_frac"] == 0.5
    assert found["adv_abs_mean"] == 1.0 and found["zero_adv_group_frac"] == 0.0
    assert found["no_signal_frac"] == 0.0  # the sample without advantage has no token
    assert found["empty_response_frac"] == 0.4  # literally empty: also one whose mask is not


def test_rloo_with_no_complete_group_or_no_token_gives_zeros():
    found = rloo([1.0, 2.0], [0, 1], [1, 1])
    assert found.pop("dropped_group_frac") == 1.0
    assert set(found.values()) == {0.0}
    assert rloo([1.0, 1, 1], [0, 0, 0], [0, 0, 0])["no_signal_frac"] == 0.0


def test_small_advantages_count_as_zero_only_below_1e_12():
    tiny = rloo([1e-13, 0.0], [0, 0], [1, 1], size=2)
    small = rloo([1e-11, 0.0], [0, 0], [1, 1], size=2)
    assert (tiny["zero_adv_group_frac"], small["zero_adv_group_frac"]) == (1.0, 0.0)


def advantage_metrics(name, mask=((1, 1), (1, 0)), **given):
    row, settings = ALGORITHMS[name], AlgorithmSection(**given).model_dump()
    batch = {
        "reward_B": torch.tensor([3.0, 1.0]),
        "group_id_B": torch.tensor([0, 0]),
        "mask_BT": torch.tensor(mask),
        "rollout_logp_BT": torch.zeros(2, 2),
        "teacher_logp_BT": torch.zeros(2, 2),
    }
    return metrics.advantage_metrics(
        row,
        compute(row, batch, settings),
        batch["mask_BT"],
        batch["reward_B"],
        batch["group_id_B"],
        group_size=2,
        response_len_B=torch.tensor([2, 1]),
        settings=settings,
    )


def test_reinforce_plus_plus_golden():
    """Tokens 1, 1, -1: mean 1/3, deviation sqrt(8)/3."""
    found = advantage_metrics("reinforce_plus_plus_baseline", normalize_advantages=True)
    prefix = "rollout/reinforce_pp_"
    assert found == pytest.approx(
        {
            "rollout/zero_std_frac": 0.0,
            "rollout/advantages": 0.0,
            f"{prefix}advantage_raw_mean": 1 / 3,
            f"{prefix}advantage_raw_std": 8**0.5 / 3,
            f"{prefix}advantage_normalized_mean": 0.0,
            f"{prefix}advantage_normalized_std": 1.0,
            f"{prefix}valid_token_count": 3.0,
            f"{prefix}zero_variance": 0.0,
        },
        abs=1e-6,
    )


def test_zero_variance_is_told():
    found = advantage_metrics(
        "reinforce_plus_plus_baseline", ((1, 0), (0, 0)), normalize_advantages=True
    )
    assert found["rollout/reinforce_pp_zero_variance"] == 1.0
    assert found["rollout/reinforce_pp_valid_token_count"] == 1.0


def test_metrics_without_a_meaning_are_absent():
    assert advantage_metrics("grpo", normalize_advantages=True).keys() == {
        "rollout/zero_std_frac",
        "rollout/advantages",
    }
    assert "rollout/rloo/adv_abs_mean" in advantage_metrics("rloo")
    assert "rollout/rloo/adv_abs_mean" in advantage_metrics("rloo", use_opd=True)
    for given in (
        {"custom_reward_post_process_path": "a:b"},
        {"custom_advantage_path": "a:b"},
        {"use_opd": True, "opd_only_reward": True},
    ):
        found = advantage_metrics("rloo", **given)
        assert not [name for name in found if name.startswith("rollout/rloo/")]
    assert "rollout/advantages" not in advantage_metrics("grpo", ((0, 0), (0, 0)))


def test_lengths():
    assert metrics.length_metrics([1, 2, 3, 10], [False, False, False, True]) == {
        "rollout/response_len/mean": 4.0,
        "rollout/response_len/median": 2.5,
        "rollout/response_len/max": 10.0,
        "rollout/response_len/min": 1.0,
        "rollout/truncated_ratio": 0.25,
    }


def test_repetition():
    sentence = "She sells 3 apples for 4 dollars each, which makes 12 dollars in all. "
    varied = " ".join(str(i * i % 997) for i in range(3000))
    assert metrics.repetition_frac(["", "no", sentence, varied]) == 0.0
    assert metrics.repetition_frac(["ha " * 200, sentence * 100, varied, "ab"]) == 0.5
    assert metrics.repetition_frac([varied + "ha " * 5000]) == 1.0  # the end is what counts


def test_zero_std_frac():
    assert metrics.zero_std_frac([1.0, 0.0, 0.3, 0.3, 0.3], [4, 4, 9, 9, 9]) == 0.5


def test_pass_rates():
    """Groups with 1 and 0 of 4 passing: 1 - C(3, k) / C(4, k) is 1/4, 1/2, 1."""
    found = metrics.pass_rates([1.0, 0, 0, 0.5, 0, 0, 0, 0], [0] * 4 + [1] * 4, 4)
    assert found == pytest.approx(
        {
            "rollout/passrate/pass@1": 0.125,
            "rollout/passrate/pass@2": 0.25,
            "rollout/passrate/pass@4": 0.5,
        }
    )
