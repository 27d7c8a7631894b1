"""Golden numbers of the advantage functions, typed by hand, and what they refuse."""

import pytest
import torch

from relax.algorithms import advantages

INF, NAN = float("inf"), float("nan")


def close(found, wanted, **tolerance):
    torch.testing.assert_close(
        found, torch.tensor(wanted), **({"rtol": 1e-6, "atol": 1e-8} | tolerance)
    )


def groups(*sizes):
    return torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))


def test_group_normalized_golden():
    reward_B = torch.tensor([1.0, 0, 0, 0, 1, 0, 0.2, 0.5, 0.9, 0.4])
    close(
        advantages.group_normalized(reward_B, groups(4, 2, 4)),
        [
            1.499997,
            -0.499999,
            -0.499999,
            -0.499999,
            0.70710578,
            -0.70710578,
            -1.01904587,
            0,
            1.35872783,
            -0.33968196,
        ],
        atol=1e-7,
    )
    centred_B = advantages.group_normalized(reward_B, groups(4, 2, 4), std_normalization=False)
    close(centred_B, [0.75, -0.25, -0.25, -0.25, 0.5, -0.5, -0.3, 0, 0.4, -0.1])
    assert centred_B.dtype == torch.float32


def test_group_centered_golden():
    found_B = advantages.group_centered(torch.tensor([1.0, 0, 0, 0, 5]), groups(4, 1))
    close(found_B, [0.75, -0.25, -0.25, -0.25, 0])


def test_leave_one_out_golden():
    reward_B = torch.tensor([1.0, 0, 0, 0, 0.2, 0.5, 0.9, 0.4])
    third = 1 / 3
    close(
        advantages.leave_one_out(reward_B, groups(4, 4)),
        [1, -third, -third, -third, -0.4, 0, 0.53333333, -0.13333333],
        atol=1e-7,
    )


@pytest.mark.parametrize(
    "function",
    [advantages.group_normalized, advantages.group_centered, advantages.leave_one_out],
)
@pytest.mark.parametrize("value", [100.3, 0.1, -1e-30, 1 / 3])
def test_equal_rewards_give_exact_zeros(function, value):
    reward_B = torch.full((15,), value)
    assert function(reward_B, groups(15)).tolist() == [0.0] * 15


def test_groups_are_formed_by_id_and_not_by_position():
    reward_B = torch.tensor([1.0, 7, 0, 3, 0, 0])
    group_id_B = torch.tensor([9, 4, 9, 4, 9, 9])
    close(
        advantages.group_normalized(reward_B, group_id_B),
        [1.499997, 0.70710653, -0.499999, -0.70710653, -0.499999, -0.499999],
    )


def test_group_of_one():
    assert advantages.group_normalized(torch.tensor([3.0]), groups(1)).tolist() == [0.0]
    with pytest.raises(ValueError, match=r"group \[1\]: one response; .* at least 2"):
        advantages.leave_one_out(torch.tensor([1.0, 2, 3]), groups(2, 1))


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_non_finite_rewards_are_refused_naming_the_samples(bad):
    reward_B, mask_BT = torch.tensor([0.0, 1, bad, 1]), torch.ones(4, 2)
    calls = [
        lambda: advantages.raw_reward(reward_B),
        lambda: advantages.group_normalized(reward_B, groups(4)),
        lambda: advantages.group_centered(reward_B, groups(4)),
        lambda: advantages.leave_one_out(reward_B, groups(4)),
        lambda: advantages.kl_to_go_return(reward_B, mask_BT, mask_BT, kl_coef=0.1),
        lambda: advantages.token_rewards(reward_B, None, mask_BT),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=r"reward: not finite at \[2\]"):
            call()


def test_kl_to_go_return_golden():
    found_BT = advantages.kl_to_go_return(
        torch.tensor([1.0]), torch.tensor([[0.2, -0.1]]), torch.ones(1, 2), kl_coef=0.1
    )
    close(found_BT, [[0.99, 1.01]])


def test_kl_to_go_return_with_a_hole_padding_and_discount():
    mask_BT = torch.tensor([[1.0, 0, 1, 0], [0, 0, 0, 0]])
    kl_BT = torch.tensor([[0.2, NAN, -0.1, INF], [NAN] * 4])
    found_BT = advantages.kl_to_go_return(
        torch.tensor([1.0, 8.0]), kl_BT, mask_BT, kl_coef=0.1, gamma=0.5
    )
    # last valid: 1 + 0.01; first: -0.02 + 0.5 * 1.01, the hole costs nothing
    close(found_BT, [[0.485, 0, 1.01, 0], [0, 0, 0, 0]])


def test_gae_golden():
    advantage_BT, return_BT = advantages.gae(
        torch.tensor([[1.0, 0, 0.5]]),
        torch.tensor([[0.1, 0.2, 0.3]]),
        torch.ones(1, 3),
        gamma=0.99,
        lambd=0.95,
    )
    close(advantage_BT, [[1.36613655, 0.2851, 0.2]])
    close(return_BT, [[1.46613655, 0.4851, 0.5]])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["reward", "value", "kl"])
def test_what_is_not_finite_on_a_valid_token_is_refused(name, bad):
    mask_BT = torch.ones(3, 2)
    tensors = {n: torch.zeros(3, 2) for n in ("reward", "value", "kl")}
    tensors[name][2, 0] = bad

    def results():
        if name == "kl":
            return advantages.kl_to_go_return(torch.zeros(3), tensors["kl"], mask_BT, kl_coef=0.1)
        return advantages.gae(tensors["reward"], tensors["value"], mask_BT)[0]

    with pytest.raises(ValueError, match=rf"{name}: not finite on a valid token of .* \[2\]"):
        results()
    mask_BT[2, 0] = 0
    assert torch.equal(results(), torch.zeros(3, 2))


def test_gae_skips_masked_positions():
    mask_BT = torch.tensor([[False, True, False, True, True, False]])
    reward_BT = torch.tensor([[NAN, 1.0, INF, 0, 0.5, NAN]])
    value_BT = torch.tensor([[INF, 0.1, NAN, 0.2, 0.3, 5.0]])
    advantage_BT, return_BT = advantages.gae(reward_BT, value_BT, mask_BT, gamma=0.99, lambd=0.95)
    close(advantage_BT, [[0, 1.36613655, 0, 0.2851, 0.2, 0]])
    close(return_BT, [[0, 1.46613655, 0, 0.4851, 0.5, 0]])


def test_token_rewards_golden():
    mask_BT = torch.tensor([[1.0, 1, 0], [1, 0, 1], [0, 0, 0]])
    kl_BT = torch.tensor([[0.5, -1, NAN], [2, INF, 0], [1, 1, 1]])
    found_BT = advantages.token_rewards(torch.tensor([1.0, 2, 3]), kl_BT, mask_BT, kl_coef=0.1)
    close(found_BT.float(), [[-0.05, 1.1, 0], [-0.2, 0, 2], [0, 0, 0]])
    plain_BT = advantages.token_rewards(torch.tensor([1.0, 2, 3]), None, mask_BT)
    close(plain_BT.float(), [[0.0, 1, 0], [0, 0, 2], [0, 0, 0]])


def test_whiten_tokens_golden():
    advantage_BT = torch.tensor([[1.0, 3, NAN], [5, INF, 7]])
    mask_BT = torch.tensor([[1, 1, 0], [1, 0, 1]])
    # mean 4, population variance 5
    root = 5**0.5
    close(
        advantages.whiten_tokens(advantage_BT, mask_BT),
        [[-3 / root, -1 / root, 0], [1 / root, 0, 3 / root]],
    )


def test_whiten_tokens_floors_the_variance():
    advantage_BT = torch.tensor([[0.0, 2e-5]])  # variance 1e-10 counts as 1e-8
    close(advantages.whiten_tokens(advantage_BT, torch.ones(1, 2)), [[-0.1, 0.1]])


def test_whiten_unbiased_golden():
    advantage_BT = torch.tensor([[1.0, 3, NAN], [5, INF, 7]])
    mask_BT = torch.tensor([[1, 1, 0], [1, 0, 1]])
    root = (20 / 3 + 1e-8) ** 0.5
    close(
        advantages.whiten_unbiased(advantage_BT, mask_BT),
        [[-3 / root, -1 / root, 0], [1 / root, 0, 3 / root]],
    )
    small_BT = torch.tensor([[0.0, 2e-4]])  # unbiased variance 2e-8, 1e-8 added under the root
    half = 1e-4 / 3e-8**0.5
    close(advantages.whiten_unbiased(small_BT, torch.ones(1, 2)), [[-half, half]])


@pytest.mark.parametrize("whiten", [advantages.whiten_tokens, advantages.whiten_unbiased])
def test_whitening_without_variance_or_tokens(whiten):
    equal_BT, mask_BT = torch.full((3, 2), 0.3), torch.ones(3, 2)
    assert whiten(equal_BT, mask_BT).abs().sum() == 0
    assert whiten(equal_BT[:1, :1], mask_BT[:1, :1]).tolist() == [[0.0]]
    with pytest.raises(ValueError, match="no valid token"):
        whiten(equal_BT, torch.zeros(3, 2))


def test_distilled_golden():
    found_BT = advantages.distilled(
        torch.tensor([[1.0, 1, NAN]]),
        torch.tensor([[-1.0, -2, INF]]),
        torch.tensor([[-0.5, -3, NAN]]),
        torch.tensor([[1, 1, 0]]),
        opd_kl_coef=0.1,
    )
    close(found_BT, [[1.05, 0.9, 0]])


def test_broadcast():
    mask_BT = torch.tensor([[1, 0, 1], [0, 0, 0]])
    found_BT = advantages.broadcast(torch.tensor([2.0, 3.0]), mask_BT)
    assert found_BT.tolist() == [[2, 0, 2], [0, 0, 0]]


def test_advantages_are_float32_whatever_comes_in():
    for dtype in (torch.float64, torch.bfloat16, torch.float32):
        reward_B = torch.tensor([1, 0], dtype=dtype)
        assert advantages.group_normalized(reward_B, groups(2)).dtype == torch.float32
        returned = advantages.gae(reward_B[None], reward_B[None], torch.ones(1, 2))
        assert [x.dtype for x in returned] == [torch.float32] * 2
