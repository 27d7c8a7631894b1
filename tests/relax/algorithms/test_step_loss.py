"""The loss of an optimizer step and every train/ metric, on numbers small enough to do by hand."""

import math

import pytest
import torch

from relax.algorithms import ALGORITHMS
from relax.algorithms.loss import (
    StepCounts,
    bound_metrics,
    critic_loss,
    mismatch,
    old_logp,
    selected,
    step_bounds,
    step_loss,
)
from relax.algorithms.objectives import M2POBounds
from relax.config import AlgorithmSection
from relax.errors import ConfigError

LN2 = math.log(2)
COUNTS = StepCounts(num_tokens=3, num_responses=2, max_response_len=10)


def settings(**given):
    return AlgorithmSection(**given).model_dump()


def batch(**changed):
    """Two responses: A = 1 with ratios 2 and 1; A = -1 with ratio 1/2 and a masked token."""
    return {
        "mask_BT": torch.tensor([[1.0, 1.0], [1.0, 0.0]]),
        "logp_BT": torch.tensor([[-1.0, -2.0], [-3.0, math.nan]]).requires_grad_(),
        "entropy_BT": torch.tensor([[0.5, 1.5], [1.0, math.inf]]),
        "old_logp_BT": torch.tensor([[-1.0 - LN2, -2.0], [-3.0 + LN2, math.nan]]),
        "rollout_logp_BT": torch.tensor([[-1.0, -2.0], [-3.0, -math.inf]]),
        "ref_logp_BT": torch.tensor([[-1.5, -2.0], [-2.5, 0.0]]),
        "advantage_BT": torch.tensor([[1.0, 1.0], [-1.0, math.nan]]),
    } | changed


def evaluate(name, given=None, tensors=None, **extra):
    tensors = tensors or batch()
    loss = step_loss(ALGORITHMS[name], settings(**(given or {})), COUNTS, **extra)
    total, sums = loss(tensors)
    (gradient_BT,) = torch.autograd.grad(total, tensors["logp_BT"])
    return {k.removeprefix("train/"): v.item() for k, v in sums.items()}, gradient_BT


def test_grpo_golden():
    """Losses -1.2 (clipped), -1, 0.8 (clipped); response means -1.1 and 0.8, over two."""
    found, gradient_BT = evaluate("grpo")
    assert found == pytest.approx(
        {
            "loss": -0.15,
            "pg_loss": -0.15,
            "entropy_loss": (1.0 + 1.0) / 2,
            "pg_clipfrac": 2 / 3,
            "pg_clipfrac_pos": 1 / 3,
            "pg_clipfrac_neg": 1 / 3,
            "silenced_frac": 2 / 3,
            "ppo_kl": (-LN2 + 0 + LN2) / 3,
            "ois": (2 + 1 + 0.5) / 3,
        },
        abs=1e-6,
    )
    torch.testing.assert_close(gradient_BT, torch.tensor([[0.0, -0.25], [0.0, 0.0]]))


def test_token_mean_and_constant_reduction():
    found, gradient_BT = evaluate("grpo", {"calculate_per_token_loss": True})
    assert found["pg_loss"] == pytest.approx((-1.2 - 1 + 0.8) / 3)
    assert found["entropy_loss"] == pytest.approx(1.0)
    assert gradient_BT[0, 1].item() == pytest.approx(-1 / 3)
    found, _ = evaluate("dr_grpo")
    assert found["pg_loss"] == pytest.approx((-1.2 - 1 + 0.8) / 20)


def test_rloo_reports_a_real_zero():
    found, gradient_BT = evaluate("rloo", {"calculate_per_token_loss": True})
    assert found["pg_clipfrac"] == 0.0 and found["silenced_frac"] == 0.0
    assert found["pg_loss"] == pytest.approx((1.0 + 2.0 - 3.0) / 3, abs=1e-6)
    torch.testing.assert_close(gradient_BT, torch.tensor([[-1 / 3, -1 / 3], [1 / 3, 0.0]]))


def test_loss_is_made_of_its_reported_parts():
    given = {"entropy_coef": 0.1, "use_kl_loss": True, "kl_loss_coef": 0.5}
    found, _ = evaluate("grpo", given)
    k3 = [math.exp(-0.5) - 0.5, 0.0, math.exp(0.5) - 1.5]  # q = .5, 0, -.5
    assert found["kl_loss"] == pytest.approx(((k3[0] + k3[1]) / 2 + k3[2]) / 2, rel=1e-5)
    assert found["loss"] == pytest.approx(-0.15 - 0.1 * 1.0 + 0.5 * found["kl_loss"], rel=1e-6)


def test_kl_loss_at_coefficient_zero_is_only_reported():
    plain, gradient_BT = evaluate("grpo")
    told, told_gradient_BT = evaluate("grpo", {"use_kl_loss": True})
    assert told.pop("kl_loss") > 0 and told == plain
    assert torch.equal(gradient_BT, told_gradient_BT)


@pytest.mark.parametrize(
    ("given", "kl"),
    [
        ({"kl_loss_type": None}, [math.exp(-0.5) - 0.5, 0, math.exp(0.5) - 1.5]),
        ({"kl_loss_type": "k2"}, [0.125, 0, 0.125]),
        ({"kl_loss_type": "k2", "use_unbiased_kl": True}, [0.25, 0, 0.0625]),
    ],
)
def test_kl_estimators(given, kl):
    found, _ = evaluate("grpo", {"use_kl_loss": True, "kl_loss_coef": 1.0} | given)
    assert found["kl_loss"] == pytest.approx(((kl[0] + kl[1]) / 2 + kl[2]) / 2, rel=1e-5)


def test_the_row_names_the_kl_that_an_unset_type_means():
    found, _ = evaluate("reinforce_plus_plus_baseline", {"use_kl_loss": True, "kl_loss_coef": 1.0})
    assert found["kl_loss"] == pytest.approx((0.125 / 2 + 0.125) / 2, rel=1e-5)


def test_unbiased_kl_has_the_gradient_of_the_ratio():
    tensors = batch(advantage_BT=torch.zeros(2, 2))
    given = {"use_kl_loss": True, "kl_loss_coef": 1.0, "kl_loss_type": "k2"}
    _, gradient_BT = evaluate("grpo", given | {"use_unbiased_kl": True}, tensors)
    # d(r q^2/2) = r (q^2/2 + q): 2 * (.125 + .5) / 4 and .5 * (.125 - .5) / 2
    torch.testing.assert_close(gradient_BT, torch.tensor([[0.3125, 0.0], [-0.09375, 0.0]]))


def test_tis_golden():
    """exp(d) = 1/2, 1, 2: with the upper clip at 1.5 one token changes."""
    found, _ = evaluate("grpo", {"use_tis": True, "tis_clip": 1.5})
    assert found["pg_loss"] == pytest.approx(((-1.2 * 0.5 - 1.0) / 2 + 0.8 * 1.5) / 2)
    assert found["tis"] == pytest.approx(3.5 / 3)
    assert found["tis_clipfrac"] == pytest.approx(1 / 3)
    assert found["tis_abs"] == pytest.approx(1.5 / 3)
    assert found["pg_clipfrac"] == pytest.approx(2 / 3)  # metrics are not weighted


def test_icepop_golden():
    given = {"use_icepop": True, "tis_clip_low": 0.6, "tis_clip": 1.5}
    found, _ = evaluate("grpo", given)
    assert found["pg_loss"] == pytest.approx((-1.0 / 2) / 2)
    assert found["tis_clipfrac"] == pytest.approx(2 / 3)


def test_opsm_golden():
    found, _ = evaluate("grpo", {"use_opsm": True, "opsm_delta": 0.6})
    assert found["opsm_clipfrac"] == pytest.approx(1 / 3)  # A < 0, mean(old - logp) = ln 2
    assert found["pg_loss"] == pytest.approx(-1.1 / 2)
    assert found["entropy_loss"] == pytest.approx(1.0)  # denominators stay
    found, _ = evaluate("grpo", {"use_opsm": True, "opsm_delta": 0.7})
    assert found["opsm_clipfrac"] == 0.0


def test_which_log_probabilities_are_the_old_ones():
    tensors = batch()
    assert old_logp(tensors, settings()) is tensors["old_logp_BT"]
    engine = old_logp(tensors, settings(use_rollout_logprobs=True))
    assert engine is tensors["rollout_logp_BT"]
    own_BT = old_logp(tensors, settings(true_on_policy_mode=True))
    assert not own_BT.requires_grad and torch.equal(own_BT[0], tensors["logp_BT"][0])
    del tensors["old_logp_BT"]
    assert torch.equal(old_logp(tensors, settings())[0], tensors["logp_BT"][0])


def test_left_out_old_log_probabilities_still_have_the_gradient_of_the_ratio():
    tensors = batch()
    del tensors["old_logp_BT"]
    found, gradient_BT = evaluate("grpo", {}, tensors)
    assert found["ois"] == 1.0 and found["pg_clipfrac"] == 0.0
    torch.testing.assert_close(gradient_BT, torch.tensor([[-0.25, -0.25], [0.5, 0.0]]))


def test_metrics_without_a_meaning_are_absent():
    found, _ = evaluate("grpo")
    for name in ("tis", "opsm_clipfrac", "kl_loss", "opd_kl_term", "m2po_eps_low"):
        assert name not in found


def test_mismatch_golden():
    """d = trainer - rollout = -ln 2, 0, ln 2."""
    found = mismatch(torch.tensor([-1.0 - LN2, -2.0, -3.0 + LN2]), torch.tensor([-1.0, -2.0, -3.0]))
    wanted = {
        "train/train_rollout_logprob_abs_diff": [LN2, 0.0, LN2],
        "train/mismatch_kl": [LN2, 0.0, -LN2],
        "train/mismatch_k3_kl": [0.5 - 1 + LN2, 0.0, 2 - 1 - LN2],
    }
    assert found.keys() == wanted.keys()
    for name, values in wanted.items():
        torch.testing.assert_close(found[name], torch.tensor(values))


def test_distillation_term_is_reported_before_its_coefficient():
    tensors = batch(teacher_logp_BT=torch.tensor([[-2.0, -2.0], [-2.5, math.nan]]))
    found, _ = evaluate("grpo", {"use_opd": True, "opd_kl_coef": 7.0}, tensors)
    assert found["opd_kl_term"] == pytest.approx((1.0 + 0.0 - 0.5) / 3)


def test_silenced_frac_of_the_objectives():
    given = {"calculate_per_token_loss": True}
    bounds = M2POBounds(0.3, 0.5, 0.2, 0.1)
    silenced = {
        name: evaluate(name, given, bounds=bounds)[0]["silenced_frac"]
        for name in ("grpo", "cispo", "sapo", "rloo", "m2po")
    }
    two_thirds = pytest.approx(2 / 3)
    assert silenced == {"grpo": two_thirds, "cispo": 0, "sapo": 0, "rloo": 0, "m2po": two_thirds}
    # gspo: ratio sqrt(2) for both tokens of the first response, 1/2 for the second
    assert evaluate("gspo")[0]["silenced_frac"] == 1.0
    zero = batch(advantage_BT=torch.zeros(2, 2))
    assert evaluate("grpo", {}, zero)[0]["silenced_frac"] == 0.0


def test_m2po_bounds_of_a_step_and_their_metrics():
    row = ALGORITHMS["m2po"]
    wide = {"m2po_kl2_budget": 0.0001, "m2po_miniclip_low": 0.0, "m2po_miniclip_high": 0.0}
    bounds = step_bounds(row, settings(**wide), batch())
    assert bounds is not None
    assert bounds.m2_before == pytest.approx(LN2**2) and bounds.m2_after == pytest.approx(1e-4)
    metrics = bound_metrics(bounds, row)
    assert metrics == {
        "train/ppo_kl_m2_before": bounds.m2_before,
        "train/ppo_kl_m2_after": bounds.m2_after,
        "train/m2po_eps_low": bounds.eps_low,
        "train/m2po_eps_high": bounds.eps_high,
    }
    assert bound_metrics(None, row) == {
        "train/ppo_kl_m2_before": 0.0,
        "train/ppo_kl_m2_after": 0.0,
    }
    assert step_bounds(ALGORITHMS["grpo"], settings(), batch()) is None
    assert bound_metrics(None, ALGORITHMS["grpo"]) == {}
    found, _ = evaluate("m2po", wide, bounds=bounds)
    assert found["pg_clipfrac"] == pytest.approx(2 / 3)
    assert evaluate("m2po", wide)[0]["pg_clipfrac"] == 0.0  # r known to be 1: no bounds


def test_critic_loss_golden():
    tensors = {
        "mask_BT": torch.tensor([[1.0, 1.0], [1.0, 0.0]]),
        "value_BT": torch.tensor([[1.0, 0.0], [2.0, math.nan]]).requires_grad_(),
        "old_value_BT": torch.tensor([[0.5, 0.0], [2.0, 0.0]]),
        "return_BT": torch.tensor([[0.0, 1.0], [0.0, math.inf]]),
    }
    total, sums = critic_loss(ALGORITHMS["ppo"], settings(), COUNTS)(tensors)
    # squared errors 1 (value moved beyond .2), 1, 4: response means 1 and 4
    assert total.item() == pytest.approx(2.5)
    assert {name: value.item() for name, value in sums.items()} == pytest.approx(
        {"train/critic-value_loss": 2.5, "train/critic-value_clipfrac": 1 / 3}
    )
    (gradient_BT,) = torch.autograd.grad(total, tensors["value_BT"])
    torch.testing.assert_close(gradient_BT, torch.tensor([[0.5, -0.5], [2.0, 0.0]]))


def test_an_objective_of_the_users_own():
    def square(logp_BT, old_logp_BT, advantage_BT, mask_BT, *, power=2.0, entropy_coef=0.0):
        assert entropy_coef == 0.25  # a setting of that name reaches it
        return (logp_BT - old_logp_BT).abs() ** power, mask_BT == 7

    found, gradient_BT = evaluate("grpo", {"entropy_coef": 0.25}, custom_objective=square)
    assert found["pg_loss"] == pytest.approx((LN2**2 / 2 + LN2**2) / 2, rel=1e-6)
    torch.testing.assert_close(gradient_BT, torch.tensor([[LN2 / 2, 0], [-LN2, 0]]))


TOKENS = {name: torch.zeros(2, 3) for name in ("old_logp_BT", "advantage_BT")}


@pytest.mark.parametrize(
    ("objective", "said"),
    [
        (lambda logp, *_: logp, r"gave Tensor; \(loss_BT, clipped_BT\), two tensors, is needed"),
        (lambda logp, *_: (logp, 0.0), "gave tuple; "),
        (lambda logp, *_: (logp.sum(), logp), r"loss_BT has shape \(\); .*\(2, 3\) like logp_BT"),
        (lambda logp, *_: (logp, logp[0]), r"clipped_BT has shape \(3,\); one value a token"),
        (lambda logp, *_: (logp.detach(), logp), "loss_BT has no gradient; compute it from"),
    ],
)
def test_what_a_custom_objective_gives_is_checked(objective, said):
    shown = selected(objective, "mine.py:loss")
    logp_BT = torch.zeros(2, 3, requires_grad=True)
    with pytest.raises(ConfigError, match=f"^--custom-loss-path = 'mine.py:loss': {said}"):
        shown(logp_BT, *TOKENS.values(), torch.ones(2, 3))
