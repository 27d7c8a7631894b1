"""Properties that hold for all inputs, searched by hypothesis."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from relax.algorithms import ALGORITHMS, advantages, objectives
from relax.algorithms.loss import StepCounts, step_loss
from relax.config import AlgorithmSection

FEW = settings(max_examples=60, deadline=None, derandomize=True)
SOME = settings(max_examples=25, deadline=None, derandomize=True)
REWARDS = st.lists(
    st.lists(st.floats(-10, 10, width=32), min_size=2, max_size=6), min_size=1, max_size=5
)
RELATIVE = ("group_normalized", "group_centered", "leave_one_out")


def flat(reward_GS):
    rewards = [r for group in reward_GS for r in group]
    ids = [g for g, group in enumerate(reward_GS) for _ in group]
    return torch.tensor(rewards, dtype=torch.float64), torch.tensor(ids)


@pytest.mark.parametrize("name", RELATIVE)
@FEW
@given(reward_GS=REWARDS, shift=st.integers(-100, 100))
def test_a_shift_of_the_rewards_changes_nothing(name, reward_GS, shift):
    reward_B, group_id_B = flat([[round(r, 3) for r in group] for group in reward_GS])
    function = getattr(advantages, name)
    torch.testing.assert_close(
        function(reward_B + shift, group_id_B),
        function(reward_B, group_id_B),
        rtol=1e-4,
        atol=1e-5,
    )


@pytest.mark.parametrize(("name", "power"), zip(RELATIVE, (0, 1, 1), strict=True))
@FEW
@given(reward_GS=REWARDS, scale=st.floats(0.5, 50))
def test_a_scale_of_the_rewards(name, power, reward_GS, scale):
    """Normalized advantages keep their size (but for the floor of 1e-6), the others scale."""
    reward_B, group_id_B = flat([[round(r, 2) for r in group] for group in reward_GS])
    function = getattr(advantages, name)
    torch.testing.assert_close(
        function(reward_B * scale, group_id_B),
        function(reward_B, group_id_B) * scale**power,
        rtol=1e-3,
        atol=1e-4,
    )


@pytest.mark.parametrize("name", RELATIVE)
@FEW
@given(reward_GS=REWARDS, data=st.data())
def test_a_permutation_of_the_samples_permutes_the_advantages(name, reward_GS, data):
    reward_B, group_id_B = flat(reward_GS)
    order = torch.tensor(data.draw(st.permutations(range(len(reward_B)))))
    function = getattr(advantages, name)
    torch.testing.assert_close(
        function(reward_B[order], group_id_B[order]),
        function(reward_B, group_id_B)[order],
        rtol=1e-5,
        atol=1e-6,
    )


@pytest.mark.parametrize("name", RELATIVE)
@FEW
@given(reward_GS=REWARDS)
def test_advantages_of_a_group_sum_to_zero(name, reward_GS):
    reward_B, group_id_B = flat(reward_GS)
    found_B = getattr(advantages, name)(reward_B, group_id_B).double()
    sums_G = torch.zeros(len(reward_GS)).double().index_add_(0, group_id_B, found_B)
    assert sums_G.abs().max() <= 1e-5


HARM = st.lists(st.floats(1e-3, 30), min_size=1, max_size=60)


@FEW
@given(gaps=HARM, signs=st.lists(st.booleans(), min_size=60, max_size=60), share=st.floats(0, 2))
def test_m2po_capped_moment_is_its_budget(gaps, signs, share):
    sign_N = torch.tensor([1.0 if s else -1.0 for s in signs[: len(gaps)]]).double()
    gap_N = torch.tensor(gaps).double() * sign_N
    budget = share * gap_N.square().mean().item()
    found = objectives.m2po_bounds(
        gap_N[None],
        torch.zeros(1, len(gaps)).double(),
        sign_N[None],
        torch.ones(1, len(gaps)),
        m2po_kl2_budget=budget,
        m2po_miniclip_low=0.0,
        m2po_miniclip_high=0.0,
    )
    if found.m2_before <= budget:
        assert found[:2] == (1.0, math.inf) and found.m2_after == found.m2_before
        return
    assert found.m2_after == pytest.approx(budget, rel=1e-9, abs=1e-12)
    tau = math.log1p(found.eps_high)
    capped = gap_N.square().clamp(max=tau**2).mean().item()
    assert capped == pytest.approx(budget, rel=1e-6, abs=1e-9)


FRESH = ("grpo", "cispo", "gspo", "sapo", "m2po")


@FEW
@given(
    logp=st.lists(st.floats(-20, 0, width=32), min_size=4, max_size=4),
    advantage=st.lists(st.floats(-5, 5, width=32), min_size=2, max_size=2),
)
def test_fresh_data_is_not_clipped_and_has_the_same_gradient_everywhere(logp, advantage):
    advantage_BT = torch.tensor(advantage)[:, None].expand(2, 2)
    for name in FRESH:
        row = ALGORITHMS[name]
        bounds = {"eps_low": 0.3, "eps_high": 0.5} if row.bounds else {}
        logp_BT = torch.tensor(logp).view(2, 2).requires_grad_()
        loss_BT, clipped_BT = getattr(objectives, row.objective)(
            logp_BT, logp_BT.detach(), advantage_BT, torch.ones(2, 2), **bounds
        )
        (gradient_BT,) = torch.autograd.grad(loss_BT.sum(), logp_BT)
        assert not clipped_BT.any()
        torch.testing.assert_close(gradient_BT, -advantage_BT, rtol=1e-6, atol=0)


def whole_step(generator, num_responses=9, width=7):
    shape = (num_responses, width)
    logp_BT = -torch.rand(shape, generator=generator) * 2
    lengths_B = torch.randint(0, width + 1, (num_responses,), generator=generator)
    mask_BT = (torch.arange(width) < lengths_B[:, None]) & (
        torch.rand(shape, generator=generator) > 0.1
    )
    noise = lambda scale: torch.randn(shape, generator=generator) * scale  # noqa: E731
    return {
        "mask_BT": mask_BT.float(),
        "logp_BT": logp_BT,
        "entropy_BT": noise(1).abs(),
        "old_logp_BT": logp_BT + noise(0.3),
        "rollout_logp_BT": logp_BT + noise(0.4),
        "ref_logp_BT": logp_BT + noise(0.5),
        "advantage_BT": torch.randn(num_responses, 1, generator=generator).expand(shape) * 1.0,
    }


ALL_ON = AlgorithmSection(
    entropy_coef=0.01,
    use_kl_loss=True,
    kl_loss_coef=0.1,
    use_unbiased_kl=True,
    use_tis=True,
    use_opsm=True,
).model_dump()


def evaluate(row, batch, counts, parts):
    """Loss, metrics and gradient of a step whose responses are split into `parts`."""
    bounds = objectives.M2POBounds(0.3, 0.5, 0.1, 0.05) if row.bounds else None
    loss = step_loss(row, ALL_ON, counts, bounds=bounds)
    total, sums, gradient_BT = 0.0, {}, torch.zeros_like(batch["logp_BT"])
    for part in parts:
        piece = {name: x[part] for name, x in batch.items()}
        piece["logp_BT"] = piece["logp_BT"].clone().requires_grad_()
        value, metrics = loss(piece)
        value.backward()
        gradient_BT[part] = piece["logp_BT"].grad
        total += value.item()
        for name, x in metrics.items():
            sums[name] = sums.get(name, 0.0) + x.item()
    return total, sums, gradient_BT


@pytest.mark.parametrize("name", list(ALGORITHMS))
@SOME
@given(seed=st.integers(0, 10_000), cut=st.integers(1, 8), data=st.data())
def test_loss_gradient_and_metrics_do_not_depend_on_split_or_order(name, seed, cut, data):
    row = ALGORITHMS[name]
    batch = whole_step(torch.Generator().manual_seed(seed))
    counts = StepCounts(int(batch["mask_BT"].sum()), 9, 16)
    order = torch.tensor(data.draw(st.permutations(range(9))))
    whole = evaluate(row, batch, counts, [torch.arange(9)])
    split = evaluate(row, batch, counts, [order[:cut], order[cut:]])
    assert split[0] == pytest.approx(whole[0], rel=1e-4, abs=1e-5)
    assert split[1] == pytest.approx(whole[1], rel=1e-4, abs=1e-5)
    torch.testing.assert_close(split[2], whole[2], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", list(ALGORITHMS))
@SOME
@given(seed=st.integers(0, 10_000), plant=st.sampled_from([math.nan, math.inf, -math.inf]))
def test_what_is_under_the_mask_changes_nothing(name, seed, plant):
    row = ALGORITHMS[name]
    batch = whole_step(torch.Generator().manual_seed(seed))
    hidden_BT = batch["mask_BT"] == 0
    planted = {
        key: x if key == "mask_BT" else torch.where(hidden_BT, plant, x) for key, x in batch.items()
    }
    counts = StepCounts(int(batch["mask_BT"].sum()), 9, 16)
    clean = evaluate(row, batch, counts, [torch.arange(9)])
    dirty = evaluate(row, planted, counts, [torch.arange(9)])
    assert dirty[:2] == clean[:2]
    assert torch.equal(dirty[2], clean[2])
    assert dirty[2][hidden_BT].abs().sum() == 0


@FEW
@given(
    lengths=st.lists(st.integers(0, 6), min_size=1, max_size=5),
    gamma=st.sampled_from([1.0, 0.9]),
    seed=st.integers(0, 1000),
)
def test_a_hole_in_one_response_does_not_change_the_others(lengths, gamma, seed):
    """Masks that are mere lengths take a faster way through; it must be the same way."""
    generator = torch.Generator().manual_seed(seed)
    count = len(lengths)
    value_BT = torch.randn(count + 1, 6, generator=generator)
    reward_BT = torch.randn(count + 1, 6, generator=generator)
    mask_BT = torch.arange(6) < torch.tensor([*lengths, 0])[:, None]
    mask_BT[count] = torch.tensor([True, False, True, False, True, False])
    args = {"gamma": gamma, "lambd": 0.8}
    both = advantages.gae(reward_BT, value_BT, mask_BT, **args)
    alone = advantages.gae(reward_BT[:count], value_BT[:count], mask_BT[:count], **args)
    for x_BT, y_BT in zip(both, alone, strict=True):
        torch.testing.assert_close(x_BT[:count], y_BT)
    reward_B = reward_BT[:, 0]
    torch.testing.assert_close(
        advantages.kl_to_go_return(reward_B, value_BT, mask_BT, kl_coef=0.2, gamma=gamma)[:count],
        advantages.kl_to_go_return(
            reward_B[:count], value_BT[:count], mask_BT[:count], kl_coef=0.2, gamma=gamma
        ),
    )
