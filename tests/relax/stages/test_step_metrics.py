"""Every metric of ALGORITHMS section 5 from real runs: where it means something, and only there."""

import math

import pytest
from stage_cases import all_metrics, settings_of, train

from relax.algorithms import ALGORITHMS

KL = {"use_kl_loss": True, "kl_loss_coef": 0.1, "ref_load": "reference"}
OPD = {"use_opd": True, "opd_teacher_load": "teacher"}
WHITE = {"normalize_advantages": True}
TWO = {"num_steps_per_rollout": 2, "lr": 1e-2}

# Name of a run -> its settings. The last step's last optimizer step is looked at.
RUNS = {
    "grpo": {},
    "grpo kl": KL,
    "grpo kl at 0": {**KL, "kl_loss_coef": 0.0},
    "grpo tis": {"use_tis": True},
    "grpo icepop": {"use_icepop": True},
    "grpo opsm": {"use_opsm": True, **TWO},
    "grpo engine's": {"use_rollout_logprobs": True},
    "grpo whitened": WHITE,
    "grpo opd": OPD,
    "grpo opd overlap": {**OPD, "opd_log_prob_top_k": 2},
    "dr_grpo": {},
    "rloo": {"calculate_per_token_loss": True},
    "rloo opd": {"calculate_per_token_loss": True, **OPD},
    "rloo opd alone": {"calculate_per_token_loss": True, **OPD, "opd_only_reward": True},
    "ppo": {},
    "ppo waiting": {"num_critic_only_steps": 1},
    "cispo": {},
    "gspo": {},
    "sapo": {},
    "m2po": {},
    "m2po bound": {**TWO, "m2po_kl2_budget": 1e-9},
    "m2po free": {**TWO, "m2po_kl2_budget": 1e3},
    "reinforce_plus_plus": {**WHITE, "kl_coef": 0.1, "ref_load": "reference"},
    "reinforce_plus_plus_baseline": {**WHITE, **KL},
}


def names(*words):
    """Runs whose name is one of these, or starts with one that ends in *."""
    return {
        run
        for run in RUNS
        for word in words
        if run == word or (word.endswith("*") and run.startswith(word[:-1]))
    }


EVERY = set(RUNS)
ACTOR = EVERY - {"ppo waiting"}
CORRECTED = names("grpo tis", "grpo icepop")
GREEN = names("reinforce_plus_plus*")
LEAVE_ONE_OUT = names("rloo", "rloo opd")
M2PO = names("m2po*")

PRESENT: dict[str, set[str]] = {
    **dict.fromkeys(
        ["train/loss", "train/pg_loss", "train/pg_clipfrac", "train/pg_clipfrac_pos",
         "train/pg_clipfrac_neg", "train/silenced_frac", "train/ppo_kl", "train/entropy_loss",
         "train/grad_norm", "train/lr", "train/ois", "train/skipped_steps"],
        ACTOR,
    ),
    "train/kl_loss": names("grpo kl*", "reinforce_plus_plus_baseline"),
    **dict.fromkeys(["train/tis", "train/tis_clipfrac", "train/tis_abs"], CORRECTED),
    "train/opsm_clipfrac": {"grpo opsm"},
    **dict.fromkeys(
        ["train/train_rollout_logprob_abs_diff", "train/train_rollout_logprob_abs_max",
         "train/mismatch_kl", "train/mismatch_k3_kl"],
        ACTOR,
    ),
    **dict.fromkeys(["train/m2po_eps_low", "train/m2po_eps_high"], names("m2po bound")),
    **dict.fromkeys(["train/ppo_kl_m2_before", "train/ppo_kl_m2_after"], M2PO),
    "train/opd_kl_term": names("grpo opd*", "rloo opd*"),
    "train/opd_topk_overlap": {"grpo opd overlap"},
    **dict.fromkeys(
        ["train/critic-value_loss", "train/critic-value_clipfrac", "train/critic-grad_norm",
         "train/critic-lr", "train/critic-skipped_steps"],
        names("ppo*"),
    ),
    **dict.fromkeys(
        ["rollout/raw_reward", "rollout/rewards", "rollout/advantages", "rollout/response_len/mean",
         "rollout/response_len/median", "rollout/response_len/max", "rollout/response_len/min",
         "rollout/truncated_ratio", "rollout/repetition_frac", "rollout/zero_std_frac",
         "rollout/policy_version", "rollout/staleness", "rollout/passrate/pass@1",
         "rollout/passrate/pass@2", "rollout/passrate/pass@4"],
        EVERY,
    ),
    **dict.fromkeys(
        [f"rollout/reinforce_pp_{name}" for name in (
            "advantage_raw_mean", "advantage_raw_std", "advantage_normalized_mean",
            "advantage_normalized_std", "valid_token_count", "zero_variance")],
        GREEN,
    ),
    **dict.fromkeys(
        [f"rollout/rloo/{name}" for name in (
            "baseline_mean", "adv_abs_mean", "no_signal_frac", "empty_response_frac",
            "zero_adv_group_frac", "dropped_group_frac")],
        LEAVE_ONE_OUT,
    ),
}  # fmt: skip

# Not in the contract: facts of the rollout that every run has.
FURTHER = {
    "rollout/dropped_prompts",
    "rollout/num_turns",
    "rollout/empty_frac",
    "rollout/full_support",
}

VERIFIER = '''
def parity(response_text: str, label: str) -> float:
    """1 for an even length."""
    return 1.0 - len(response_text) % 2
'''


def test_every_row_is_among_the_runs():
    assert {name.split(" ")[0] for name in RUNS} == ALGORITHMS.keys()


@pytest.fixture(scope="module", params=RUNS)
def found(request, models, task, tmp_path_factory):
    """(name of the run, metrics of its only step)."""
    root = tmp_path_factory.mktemp("metrics")
    (root / "parity.py").write_text(VERIFIER)
    changed = {"num_rollout": 1, "custom_rm_path": f"{root / 'parity.py'}:parity"}
    changed |= {"advantage_estimator": request.param.split(" ")[0], **RUNS[request.param]}
    return request.param, all_metrics(train(settings_of(models, task, root / "run", **changed)), 0)


def test_metrics_are_there_exactly_where_they_mean_something(found):
    name, metrics = found
    expected = {metric for metric, runs in PRESENT.items() if name in runs}
    assert metrics.keys() - FURTHER == expected
    assert all(math.isfinite(value) for value in metrics.values())


def test_they_fit_together(found):
    """What section 5 says of them, as far as one number follows from others."""
    name, m = found
    if "train/loss" in m:
        own, coefficient = RUNS[name], RUNS[name].get("kl_loss_coef", 0.0)
        loss = m["train/pg_loss"] + coefficient * m.get("train/kl_loss", 0.0)
        assert m["train/loss"] == pytest.approx(loss, rel=1e-6, abs=1e-9)
        assert 0 < m["train/entropy_loss"] < math.log(64)
        assert 0 <= m["train/silenced_frac"] <= 1
        if not own.get("num_steps_per_rollout") and "engine's" not in name:
            assert m["train/ois"] == pytest.approx(1, abs=1e-5)
            assert m["train/ppo_kl"] == pytest.approx(0, abs=1e-5)
            if not CORRECTED & {name}:
                assert m["train/pg_clipfrac"] == 0
    if name in ACTOR:  # the engine samples by the same weights
        assert m["train/mismatch_kl"] == pytest.approx(0, abs=1e-4)
        assert 0 <= m["train/train_rollout_logprob_abs_diff"] < 1e-3
    if name == "m2po bound":
        assert m["train/ppo_kl_m2_before"] > m["train/ppo_kl_m2_after"]
        assert m["train/ppo_kl_m2_after"] == pytest.approx(1e-9)
    if name == "m2po free":
        assert m["train/ppo_kl_m2_before"] == m["train/ppo_kl_m2_after"] > 0
    if name == "m2po":
        assert m["train/ppo_kl_m2_before"] == m["train/ppo_kl_m2_after"] == 0
    if name in GREEN:
        assert m["rollout/reinforce_pp_advantage_normalized_mean"] == pytest.approx(0, abs=1e-6)
        assert m["rollout/reinforce_pp_advantage_normalized_std"] == pytest.approx(1, rel=1e-5)
    assert m["rollout/passrate/pass@1"] == pytest.approx(m["rollout/raw_reward"])
    assert m["rollout/passrate/pass@4"] >= m["rollout/passrate/pass@2"]
