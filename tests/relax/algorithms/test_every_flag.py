"""Each setting of [algorithm] reaches the mathematics: changing it changes the result."""

import pytest
import torch

from relax.algorithms import ALGORITHMS, rules
from relax.algorithms.loss import StepCounts, critic_loss, step_bounds, step_loss
from relax.algorithms.whole_rollout import compute
from relax.config import AlgorithmSection

KL_LOSS = {"use_kl_loss": True, "kl_loss_coef": 0.1}
OPD = {"use_opd": True}
PLUS = {"normalize_advantages": True, "kl_coef": 0.1}
CHANGES = {
    "normalize_advantages": ("grpo", {}, True),
    "disable_grpo_std_normalization": ("gspo", {}, True),
    "disable_rewards_normalization": ("cispo", {}, True),
    "calculate_per_token_loss": ("sapo", {}, True),
    "gamma": ("reinforce_plus_plus", PLUS, 0.9),
    "lambd": ("ppo", {}, 0.5),
    "eps_clip": ("grpo", {}, 0.1),
    "eps_clip_high": ("cispo", {}, 10.0),
    "eps_clip_c": ("grpo", {}, 1.1),
    "value_clip": ("ppo", {}, 0.05),
    "entropy_coef": ("rloo", {"calculate_per_token_loss": True}, 0.01),
    "use_kl_loss": ("grpo", {}, True),
    "kl_loss_coef": ("grpo", {"use_kl_loss": True}, 0.5),
    "kl_loss_type": ("grpo", KL_LOSS, "k2"),
    "use_unbiased_kl": ("m2po", KL_LOSS, True),
    "kl_coef": ("ppo", {}, 0.2),
    "sapo_tau_pos": ("sapo", {}, 2.0),
    "sapo_tau_neg": ("sapo", {}, 2.0),
    "m2po_kl2_budget": ("m2po", {"m2po_miniclip_low": 0.0, "m2po_miniclip_high": 0.0}, 0.03),
    "m2po_miniclip_low": ("m2po", {}, 0.1),
    "m2po_miniclip_high": ("m2po", {}, 0.2),
    "use_tis": ("grpo", {}, True),
    "use_icepop": ("grpo", {"tis_clip": 1.3}, True),
    "tis_clip_low": ("gspo", {"use_tis": True}, 0.9),
    "tis_clip": ("gspo", {"use_icepop": True}, 1.1),
    "use_opsm": ("grpo", {}, True),
    "opsm_delta": ("grpo", {"use_opsm": True}, 1.0),
    "use_rollout_logprobs": ("grpo", {}, True),
    "true_on_policy_mode": ("grpo", {}, True),
    "use_opd": ("grpo", {}, True),
    "opd_kl_coef": ("grpo", OPD, 0.5),
    "opd_only_reward": ("grpo", OPD, True),
}
ELSEWHERE = {  # in the tests of stages and flows, of the rules and of docs/adding_an_algorithm.md
    "advantage_estimator",
    "num_critic_only_steps",
    "ref_update_interval",
    "opd_log_prob_top_k",
    "drop_incomplete_groups",
    "mask_truncated",
    "custom_advantage_path",
    "custom_loss_path",
    "custom_reward_post_process_path",
}


def rollout():
    generator = torch.Generator().manual_seed(5)
    noise = lambda scale: torch.randn(8, 6, generator=generator) * scale  # noqa: E731
    logp_BT = -1 - noise(0.3).abs()
    lengths_B = torch.tensor([6, 5, 4, 3, 2, 1, 6, 6])
    return {
        "reward_B": torch.tensor([1.0, 0, 0.5, 0, 2, 0, 0, 1]),
        "group_id_B": torch.arange(8) // 4,
        "mask_BT": (torch.arange(6) < lengths_B[:, None]).float(),
        "logp_BT": logp_BT,
        "old_logp_BT": logp_BT + noise(0.3),
        "rollout_logp_BT": logp_BT + noise(0.3),
        "ref_logp_BT": logp_BT + noise(0.3),
        "teacher_logp_BT": logp_BT + noise(0.3),
        "entropy_BT": noise(1.0).abs(),
        "value_BT": noise(0.5),
        "old_value_BT": noise(0.5),
    }


def result(name, given):
    """Everything a rollout's one optimizer step computes, as one tensor, and its metrics' names."""
    row, settings = ALGORITHMS[name], AlgorithmSection(**given).model_dump()
    batch = rollout()
    found = compute(row, batch, settings)
    batch["advantage_BT"] = found.advantage_BT
    batch["logp_BT"].requires_grad_()
    batch["entropy_BT"].requires_grad_()
    counts = StepCounts(int(batch["mask_BT"].sum()), 8, 16)
    bounds = step_bounds(row, settings, batch)
    loss, sums = step_loss(row, settings, counts, bounds=bounds)(batch)
    leaves = batch["logp_BT"], batch["entropy_BT"]
    parts = [found.advantage_BT, loss[None], *torch.autograd.grad(loss, leaves)]
    if row.value_objective:
        batch["return_BT"] = found.return_BT
        parts.append(critic_loss(row, settings, counts)(batch)[0][None])
    return torch.cat([part.detach().flatten() for part in parts]), set(sums)


@pytest.mark.parametrize("flag", CHANGES)
def test_changing_it_changes_the_result(flag):
    name, base, value = CHANGES[flag]
    before, names = result(name, base)
    again, _ = result(name, base)
    after, more_names = result(name, base | {flag: value})
    assert torch.equal(before, again)
    assert torch.isfinite(after).all()
    assert not torch.equal(before, after) or names != more_names


def test_no_setting_is_forgotten():
    assert CHANGES.keys() | ELSEWHERE == AlgorithmSection.model_fields.keys()


def test_the_rules_would_accept_what_is_changed_here():
    """A flag that its algorithm does not use would prove nothing."""
    for flag, (name, _, _) in CHANGES.items():
        assert flag not in ALGORITHMS[name].refused
        assert flag not in rules.KNOBS or flag in ALGORITHMS[name].uses
