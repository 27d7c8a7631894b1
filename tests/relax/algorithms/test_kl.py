"""Golden numbers and gradients of the KL estimators."""

import pytest
import torch

from relax.algorithms import kl

NAN, INF = float("nan"), float("inf")


def evaluate(kind, logp, ref, **given):
    logp_BT = torch.tensor([logp], requires_grad=True)
    kl_BT = kl.estimate(logp_BT, torch.tensor([ref]), kind, **given)
    (gradient_BT,) = torch.autograd.grad(kl_BT.sum(), logp_BT)
    return kl_BT[0].detach(), gradient_BT[0]


@pytest.mark.parametrize(
    ("kind", "value", "slope"),
    [
        ("k1", 0.5, 1.0),
        ("k2", 0.125, 0.5),
        ("k3", 0.10653066, 0.39346934),  # exp(-.5) - .5; 1 - exp(-.5)
        ("low_var_kl", 0.10653066, 0.39346934),
    ],
)
def test_golden(kind, value, slope):
    found, gradient = evaluate(kind, [-1.0], [-1.5])
    torch.testing.assert_close(found, torch.tensor([value]), rtol=1e-6, atol=0)
    torch.testing.assert_close(gradient, torch.tensor([slope]), rtol=1e-6, atol=0)


def test_low_var_kl_is_bounded_and_k3_is_not():
    found, gradient = evaluate("low_var_kl", [-9.0], [-4.0])  # exp(5) - 6 = 142.4
    assert (found.item(), gradient.item()) == (10.0, 0.0)
    found, _ = evaluate("k3", [-9.0], [-4.0])
    assert found.item() == pytest.approx(142.413159, rel=1e-6)


def test_the_importance_ratio_multiplies_before_the_bound_and_has_a_gradient():
    ratio_BT = torch.tensor([[3.0]], requires_grad=True)
    found, _ = evaluate("low_var_kl", [-7.0], [-4.0], importance_ratio_BT=ratio_BT)
    assert found.item() == 10.0  # 16.09 * 3, bounded after; 10 * 3 would be 30
    logp_BT = torch.tensor([[-1.0]])
    kl_BT = kl.estimate(logp_BT, logp_BT - 0.5, "k2", importance_ratio_BT=ratio_BT)
    (gradient_BT,) = torch.autograd.grad(kl_BT.sum(), ratio_BT)
    assert kl_BT.item() == pytest.approx(0.375) and gradient_BT.item() == pytest.approx(0.125)


def test_masked_positions_change_nothing():
    mask_BT = torch.tensor([[1, 0, 0]])
    ratio_BT = torch.tensor([[2.0, NAN, INF]])
    for kind in kl.KINDS:
        given = {"mask_BT": mask_BT, "importance_ratio_BT": ratio_BT}
        found, gradient = evaluate(kind, [-1.0, NAN, INF], [-1.5, INF, NAN], **given)
        assert found[1:].tolist() == [0, 0] and gradient[1:].tolist() == [0, 0]
        assert found[0] > 0


@pytest.mark.parametrize("kind", list(kl.KINDS))
@pytest.mark.parametrize("gap", [99.0, -99.0])
def test_huge_log_ratios_stay_finite(kind, gap):
    found, gradient = evaluate(kind, [-1.0], [-1.0 - gap])
    assert torch.isfinite(found).all() and torch.isfinite(gradient).all()


def test_unknown_kind():
    with pytest.raises(ValueError, match="'k4': known: k1, k2, k3, low_var_kl"):
        kl.estimate(torch.zeros(1, 1), torch.zeros(1, 1), "k4")
