"""Every setting that reaches `update` changes it: one persisted rollout, one knob at a time.

The rollout is made by hand, ragged and far from the trainer's policy; each run gets a copy of it.
"""

import shutil

import numpy as np
import pytest
from stage_cases import do, made_rollout, settings_of, stages_after_reward, started

from relax.config import AlgorithmSection, ModelSection, SeedSection, UpdateSection
from relax.store.commit import step_dir

KL = {"use_kl_loss": True, "kl_loss_coef": 0.1, "ref_load": "reference"}
OPD = {"use_opd": True, "opd_teacher_load": "teacher"}
WHITE = {"normalize_advantages": True}
ENGINE = {"use_rollout_logprobs": True}  # ratios far from 1 in the first optimizer step already
TWO = {"num_steps_per_rollout": 2, "lr": 1e-2}
PPO = {"advantage_estimator": "ppo", "critic_load": "critic"}
GREEN = {"advantage_estimator": "reinforce_plus_plus", **WHITE, "kl_coef": 0.1,
         "ref_load": "reference"}  # fmt: skip
SAPO = {"advantage_estimator": "sapo", **ENGINE}
M2PO = {"advantage_estimator": "m2po", **ENGINE}
TINY_CLIPS = {"m2po_miniclip_low": 0.0, "m2po_miniclip_high": 0.0}

# (what it is changed in, setting, other value)
KNOBS = [
    ({}, "advantage_estimator", "dr_grpo"),
    ({}, "normalize_advantages", True),
    ({}, "disable_grpo_std_normalization", True),
    ({}, "disable_rewards_normalization", True),
    ({}, "calculate_per_token_loss", True),
    (PPO, "gamma", 0.5),
    (GREEN, "gamma", 0.5),
    (PPO, "lambd", 0.5),
    (ENGINE, "eps_clip", 0.1),
    (ENGINE, "eps_clip_high", 0.5),
    (ENGINE, "eps_clip_c", 1.2),
    ({"advantage_estimator": "cispo", **ENGINE}, "eps_clip", 0.4),
    ({"advantage_estimator": "cispo", **ENGINE}, "eps_clip_high", 0.4),
    ({"advantage_estimator": "gspo", **ENGINE}, "eps_clip", 3.0),
    ({**PPO, **TWO, "critic_lr": 0.05, "value_clip": 5.0}, "value_clip", 1e-4),
    (PPO, "num_critic_only_steps", 1),
    ({}, "entropy_coef", 0.1),
    (KL, "kl_loss_coef", 0.2),
    (KL, "kl_loss_type", "k2"),
    (KL, "kl_loss_type", "low_var_kl"),
    ({**KL, **ENGINE}, "use_unbiased_kl", True),
    ({**PPO, "ref_load": "reference"}, "kl_coef", 0.1),
    (GREEN, "kl_coef", 0.2),
    (SAPO, "sapo_tau_pos", 2.0),
    (SAPO, "sapo_tau_neg", 2.0),
    ({**M2PO, **TINY_CLIPS}, "m2po_kl2_budget", 0.1),
    ({**M2PO, **TINY_CLIPS}, "m2po_miniclip_low", 0.5),
    ({**M2PO, **TINY_CLIPS}, "m2po_miniclip_high", 0.5),
    ({}, "use_tis", True),
    ({}, "use_icepop", True),
    ({"use_tis": True}, "tis_clip_low", 0.5),
    ({"use_tis": True}, "tis_clip", 0.9),
    ({"use_icepop": True}, "tis_clip_low", 0.5),
    ({"use_icepop": True}, "tis_clip", 0.9),
    (ENGINE, "use_opsm", True),
    ({**ENGINE, "use_opsm": True}, "opsm_delta", 1e6),
    (OPD, "use_opd", False),
    (OPD, "opd_kl_coef", 0.5),
    (OPD, "opd_only_reward", True),
    ({}, "use_rollout_logprobs", True),
    ({}, "mask_truncated", True),
    ({}, "lr", 2e-3),
    ({"lr_decay_style": "cosine", **TWO}, "min_lr", 5e-3),
    (TWO, "lr_decay_style", "linear"),
    (TWO, "lr_warmup_iters", 3),
    ({}, "weight_decay", 0.5),
    (PPO, "critic_lr", 5e-3),
    (TWO, "adam_beta1", 0.5),
    (TWO, "adam_beta2", 0.5),
    ({}, "adam_eps", 1e-2),
    (TWO, "clip_grad", 1e-6),
    ({}, "global_batch_size", 8),
    ({}, "num_steps_per_rollout", 2),
    (TWO, "seed", 77),
    ({}, "update_dtype", "bfloat16"),
    ({}, "rollout_dtype", "bfloat16"),
    ({}, "only_train_params_name_list", ("norm",)),
    ({}, "freeze_params_name_list", ("embed",)),
]  # fmt: skip

# How a step is laid out: it may change last bits and no more (test_split.py and the trainer's own
# tests), so that no key has it; test_layout.py.
BITS_ONLY = {
    "use_dynamic_batch_size",
    "micro_batch_size",
    "max_tokens_per_gpu",
    "recompute_every",
    "num_replicas",
    "offload",
}
ELSEWHERE = {
    "opd_log_prob_top_k": "a metric only",
    "use_kl_loss": "kl_loss_coef is 0 without it, and with that at 0 it is a metric only",
    "true_on_policy_mode": "says what holds without it: old_logp is left out with one step",
    "drop_incomplete_groups": "test_a_dropped_group_is_as_if_it_had_never_been",
    "ref_update_interval": "test_score.py: the reference follows the policy",
    "custom_advantage_path": "tests/relax/test_custom.py",
    "custom_loss_path": "tests/relax/test_custom.py",
    "custom_reward_post_process_path": "tests/relax/test_custom.py",
    "use_dynamic_global_batch_size": "not built",
    "skip_zero_advantage": "what it leaves out moves nothing: test_skipping.py",
    "compile_blocks": "needs a compiler: tests/relax/trainer",
    "attention": "needs a CUDA device",
}


def test_no_setting_is_forgotten():
    tried = {name for _, name, _ in KNOBS}
    sections = (AlgorithmSection, UpdateSection)
    fields = {name for section in sections for name in section.model_fields}
    assert fields - tried == ELSEWHERE.keys() | BITS_ONLY
    assert tried - fields <= set(SeedSection.model_fields)
    assert "critic_load" in ModelSection.model_fields


@pytest.fixture(scope="module")
def updated(models, task, tmp_path_factory):
    """The committed update under some settings, on the one rollout; each is computed once."""
    root, known = tmp_path_factory.mktemp("knobs"), {}

    def update(changed):
        name = repr(sorted(changed.items()))
        if name not in known:
            run = started(settings_of(models, task, root / str(len(known)), **changed))
            rollout = step_dir(root / "0", 0)
            if len(known) == 0:
                made_rollout(run, 0, np.random.default_rng(4))
            else:
                for stage in ("rollout", "reward"):
                    shutil.copytree(rollout / stage, step_dir(run.root, 0) / stage)
            do(run, 0, stages_after_reward(run.config))
            known[name] = run.committed(0, "update")
        return known[name]

    update({})
    return update


@pytest.mark.parametrize(("base", "name", "value"), KNOBS, ids=lambda x: str(x)[:40])
def test_the_knob_changes_the_update(updated, base, name, value):
    before, after = updated(base), updated({**base, name: value})
    assert before.key != after.key
    critic = [manifest.notes.get("critic") for manifest in (before, after)]
    assert before.policy.hash != after.policy.hash or critic[0] != critic[1]


def test_the_same_settings_give_the_same_bits(models, task, tmp_path):
    hashes = []
    for name in ("one", "other"):
        run = started(settings_of(models, task, tmp_path / name))
        made_rollout(run, 0, np.random.default_rng(4))
        do(run, 0, stages_after_reward(run.config))
        hashes.append(run.policy_hash(1))
    assert hashes[0] == hashes[1]


def test_a_dropped_group_is_as_if_it_had_never_been(models, task, tmp_path):
    """Denominators are the actual counts."""
    hashes = []
    for name, kept in (("lacking", 15), ("without", 12)):
        changed = {"drop_incomplete_groups": True}
        run = started(settings_of(models, task, tmp_path / name, **changed))
        made_rollout(run, 0, np.random.default_rng(4), kept=kept)
        do(run, 0, stages_after_reward(run.config))
        hashes.append(run.policy_hash(1))
    assert hashes[0] == hashes[1]


def test_only_metrics_see_the_overlap(updated):
    asked = updated({**OPD, "opd_log_prob_top_k": 3})
    assert asked.policy.hash == updated(OPD).policy.hash


def test_on_policy_mode_is_what_one_step_does_anyway(updated):
    assert updated({"true_on_policy_mode": True}).policy.hash == updated({}).policy.hash
