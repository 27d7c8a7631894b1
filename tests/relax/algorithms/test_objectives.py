"""Golden losses and gradients of the objectives, typed by hand."""

import math

import pytest
import torch

from relax.algorithms import objectives

NAN, INF = float("nan"), float("inf")


def evaluate(objective, ratio, advantage, *, logp=None, mask=None, **given):
    """loss, d loss / d logp, clipped of one response whose tokens have these ratios."""
    ratio_BT = torch.tensor([ratio], dtype=torch.float64)
    logp_BT = torch.full_like(ratio_BT, -1.0) if logp is None else torch.tensor([logp]).double()
    old_logp_BT = logp_BT - ratio_BT.log()
    leaf_BT = logp_BT.float().requires_grad_()
    mask_BT = torch.ones_like(ratio_BT) if mask is None else torch.tensor([mask])
    loss_BT, clipped_BT = objective(
        leaf_BT, old_logp_BT, torch.tensor([advantage]), mask_BT, **given
    )
    assert loss_BT.dtype == torch.float32
    (gradient_BT,) = torch.autograd.grad(loss_BT.sum(), leaf_BT)
    return loss_BT[0].detach(), gradient_BT[0], clipped_BT[0].tolist()


def close(found, wanted):
    torch.testing.assert_close(found, torch.tensor(wanted), rtol=1e-6, atol=1e-7)


def test_ppo_clip_golden():
    loss, gradient, clipped = evaluate(
        objectives.ppo_clip, [1.3, 1.3, 0.7, 0.7, 1.0], [1.0, -1, 1, -1, 2]
    )
    close(loss, [-1.2, 1.3, -0.7, 0.8, -2])
    close(gradient, [0, 1.3, -0.7, 0, -2])
    assert clipped == [True, False, False, True, False]


def test_ppo_clip_with_an_upper_margin_of_its_own():
    loss, gradient, clipped = evaluate(
        objectives.ppo_clip, [1.25, 1.5], [1.0, 1], eps_clip=0.2, eps_clip_high=0.28
    )
    close(loss, [-1.25, -1.28])
    close(gradient, [-1.25, 0])
    assert clipped == [False, True]


def test_dual_clip_golden():
    loss, gradient, clipped = evaluate(
        objectives.ppo_clip, [4.0, 1.4, 4.0], [-1.0, -1, 0], eps_clip_c=1.5
    )
    close(loss, [1.5, 1.4, 0])
    close(gradient, [0, 1.4, 0])
    assert clipped == [False, False, False]


@pytest.mark.parametrize("cap", [1.0, 0.5, -2.0, NAN])
def test_dual_clip_refuses_a_cap_of_one_or_less(cap):
    with pytest.raises(ValueError, match="must be greater than 1"):
        evaluate(objectives.ppo_clip, [1.0], [1.0], eps_clip_c=cap)


def test_reinforce_golden():
    loss, gradient, clipped = evaluate(
        objectives.reinforce, [9.0, 0.1], [2.0, -0.5], logp=[-1.5, -3.0]
    )
    close(loss, [3.0, -1.5])
    close(gradient, [-2.0, 0.5])
    assert clipped == [False, False]


def test_cispo_golden():
    loss, gradient, clipped = evaluate(
        objectives.cispo, [2.0, 0.5, 2.0, 0.5, 1.1], [1.0, 1, -1, -1, 1], logp=[-1.0] * 4 + [-2.0]
    )
    close(loss, [1.2, 0.8, -1.2, -0.8, 2.2])  # -coefficient * A * logp
    close(gradient, [-1.2, -0.8, 1.2, 0.8, -1.1])
    assert clipped == [True, True, True, True, False]


def test_cispo_without_a_lower_bound():
    _, gradient, clipped = evaluate(
        objectives.cispo, [0.01, 5.0, 12.0], [1.0, 1, 1], eps_clip=1.0, eps_clip_high=10.0
    )
    close(gradient, [-0.01, -5.0, -11.0])
    assert clipped == [False, False, True]


def gspo_of(mask, advantage=1.0, **given):
    logp_BT = torch.tensor([[-1.0, -2.0, -0.5]], requires_grad=True)
    old_logp_BT = torch.tensor([[-1.1, -1.7, -0.8]])
    advantage_BT = torch.full((1, 3), advantage)
    loss_BT, clipped_BT = objectives.gspo(
        logp_BT, old_logp_BT, advantage_BT, torch.tensor([mask]), **given
    )
    (gradient_BT,) = torch.autograd.grad(loss_BT.sum(), logp_BT)
    return loss_BT[0].detach(), gradient_BT[0], clipped_BT[0].tolist()


def test_gspo_golden():
    loss, gradient, clipped = gspo_of([1, 1, 1])
    close(loss, [-1.03389511] * 3)
    close(gradient, [-1.03389511] * 3)
    assert clipped == [False] * 3


def test_gspo_takes_the_mean_over_valid_tokens_and_clips_whole_responses():
    loss, gradient, _ = gspo_of([1, 0, 1], eps_clip=0.3)
    close(loss, [-1.22140276, 0, -1.22140276])
    close(gradient, [-1.22140276, 0, -1.22140276])
    loss, gradient, clipped = gspo_of([1, 0, 1])
    close(loss, [-1.2, 0, -1.2])
    close(gradient, [0.0, 0, 0])
    assert clipped == [True, False, True]


def test_sapo_golden():
    loss, gradient, clipped = evaluate(objectives.sapo, [1, 1.5, 0.5, 3], [1.0] * 4)
    close(loss, [-2, -2.48983732, -1.51016268, -3.52318831])
    close(gradient, [-1, -1.41002227, -0.47000742, -1.25992302])
    assert clipped == [False, False, False, True]


def test_sapo_takes_the_other_temperature_for_negative_advantages():
    loss, gradient, _ = evaluate(objectives.sapo, [1.5, 1.0], [-1.0, -2])
    # (4 / 1.05) * sigmoid(0.525); gradient 4g(1 - g) r
    close(loss, [2.3935855, 3.8095238])
    close(gradient, [1.4012097, 2.0])


HARM = {"old_minus_logp": [-0.8, -0.4, -0.1, 0.2, 0.7], "advantage": [1.0, 1.0, -1.0, -1.0, -1.0]}


def bounds_of(old_minus_logp, advantage, budget, low=0.0, high=0.0):
    old_logp_BT = torch.tensor([old_minus_logp], dtype=torch.float64)
    return objectives.m2po_bounds(
        torch.zeros_like(old_logp_BT),
        old_logp_BT,
        torch.tensor([advantage]),
        torch.ones_like(old_logp_BT),
        m2po_kl2_budget=budget,
        m2po_miniclip_low=low,
        m2po_miniclip_high=high,
    )


def test_m2po_bounds_golden():
    found = bounds_of(**HARM, budget=0.1)
    assert found.m2_before == pytest.approx(0.3325, rel=1e-12)
    assert found.eps_low == pytest.approx(0.29277765, rel=1e-7)
    assert found.eps_high == pytest.approx(0.41398246, rel=1e-7)
    assert found.m2_after == pytest.approx(0.1, rel=1e-12)


def test_m2po_bounds_golden_at_other_budgets():
    tau = -math.log1p(-bounds_of(**HARM, budget=0.04).eps_low)
    assert tau == pytest.approx(0.2, rel=1e-9)
    equal = bounds_of([-0.5] * 3, [1.0] * 3, budget=0.04)
    assert -math.log1p(-equal.eps_low) == pytest.approx(0.2, rel=1e-9)
    assert bounds_of(**HARM, budget=0.0)[:2] == (0.0, 0.0)


def test_m2po_bounds_are_never_tighter_than_the_floors():
    found = bounds_of(**HARM, budget=0.1, low=0.3, high=0.5)
    assert found[:2] == (0.3, 0.5)
    assert found.m2_after == pytest.approx(0.1)


def test_m2po_does_not_clip_within_the_budget_or_without_harm():
    within = bounds_of(**HARM, budget=0.34)
    assert within == (1.0, INF, pytest.approx(0.3325), pytest.approx(0.3325))
    harmless = bounds_of([0.8, -0.7, 0.0], [1.0, -1.0, 1.0], budget=0.0)
    assert harmless == (1.0, INF, 0.0, 0.0)


def test_m2po_golden():
    loss, gradient, clipped = evaluate(
        objectives.m2po, [1.5, 1.2, 0.6], [1.0, 1, -1], eps_low=0.3, eps_high=0.4
    )
    close(loss, [-1.4, -1.2, 0.7])
    close(gradient, [0, -1.2, 0])
    assert clipped == [True, False, True]
    loss, _, clipped = evaluate(objectives.m2po, [1e4, 1e-4], [1.0, -1], eps_low=1.0, eps_high=INF)
    torch.testing.assert_close(loss, torch.tensor([-1e4, 1e-4]), rtol=1e-5, atol=0)
    assert clipped == [False, False]


def test_value_clip_golden():
    value_BT = torch.tensor([[1.0, 1.0, 0.1, 0.5, NAN]], requires_grad=True)
    old_BT = torch.tensor([[0.5, 0.5, 0.0, 0.5, NAN]])
    return_BT = torch.tensor([[0.0, 2.0, 1.0, 0.5, INF]])
    mask_BT = torch.tensor([[1, 1, 1, 1, 0]])
    loss_BT, clipped_BT = objectives.value_clip(value_BT, old_BT, return_BT, mask_BT)
    # max(1, .7^2), max(1, 1.3^2), (.9)^2 both, 0
    close(loss_BT.detach(), [[1.0, 1.69, 0.81, 0.0, 0.0]])
    (gradient_BT,) = torch.autograd.grad(loss_BT.sum(), value_BT)
    close(gradient_BT, [[2.0, 0.0, -1.8, 0.0, 0.0]])
    assert clipped_BT.tolist() == [[True, True, False, False, False]]
    wide_BT, clipped_BT = objectives.value_clip(
        value_BT, old_BT, return_BT, mask_BT, value_clip=0.5
    )
    close(wide_BT.detach(), [[1.0, 1.0, 0.81, 0.0, 0.0]])
    assert not clipped_BT.any()


def test_only_logp_gets_a_gradient_and_it_has_its_dtype():
    for dtype in (torch.bfloat16, torch.float64):
        logp_BT = torch.tensor([[-1.0, -2.0]], dtype=dtype, requires_grad=True)
        advantage_BT = torch.tensor([[1.0, -1.0]], requires_grad=True)
        old_logp_BT = torch.tensor([[-1.0, -2.0]], requires_grad=True)
        loss_BT, _ = objectives.ppo_clip(logp_BT, old_logp_BT, advantage_BT, torch.ones(1, 2))
        loss_BT.sum().backward()
        assert loss_BT.dtype == torch.float32
        assert logp_BT.grad is not None and logp_BT.grad.dtype == dtype
        assert advantage_BT.grad is None and old_logp_BT.grad is None


def test_a_batch_larger_than_a_block_and_not_contiguous():
    """Blocks and strides must not show: 300 x 401 tokens taken from a transposed tensor."""
    torch.manual_seed(0)
    logp_TB, old_TB = -torch.rand(401, 300), -torch.rand(401, 300)
    advantage_BT, mask_BT = torch.randn(300, 1).expand(300, 401), torch.rand(300, 401) > 0.2
    loss_BT, clipped_BT = objectives.ppo_clip(logp_TB.t(), old_TB.t(), advantage_BT, mask_BT)
    for row in (0, 77, 163, 299):
        alone = slice(row, row + 1)
        part_BT, part_clipped_BT = objectives.ppo_clip(
            logp_TB.t()[alone], old_TB.t()[alone], advantage_BT[alone], mask_BT[alone]
        )
        assert torch.equal(part_BT, loss_BT[alone])
        assert torch.equal(part_clipped_BT, clipped_BT[alone])
