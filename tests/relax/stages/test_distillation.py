"""On-policy distillation through the real stages, alone and on top of other algorithms."""

import numpy as np
import pytest
from stage_cases import do, made_rollout, metrics_of, settings_of, started, train

from relax.stages.columns import counted_masks, score_lists
from relax.store import rows

OPD = {"use_opd": True, "opd_teacher_load": "teacher"}
GREEN = {"normalize_advantages": True, "kl_coef": 0.1, "ref_load": "reference"}


def test_the_students_reverse_kl_to_the_teacher_falls(models, task, tmp_path):
    changed = {**OPD, "opd_only_reward": True, "opd_log_prob_top_k": 4}
    run = train(
        settings_of(
            models, task, tmp_path / "run", num_rollout=8, rollout_batch_size=16, lr=1e-2, **changed
        )
    )
    found = [metrics_of(run, step)[0] for step in range(8)]
    kl = [one["train/opd_kl_term"] for one in found]
    overlap = [one["train/opd_topk_overlap"] for one in found]
    assert np.mean(kl[-2:]) < 0.6 * np.mean(kl[:2]), kl
    assert np.mean(overlap[-2:]) > np.mean(overlap[:2]), overlap


ROWS = {
    "grpo": {},
    "rloo": {"calculate_per_token_loss": True},
    "ppo": {"critic_load": "critic"},
    "m2po": {},
    "dr_grpo": {},
}


def advantages(run):
    do(run, 0, ["score"]) if run.config.algorithm.use_opd or run.config.algorithm.kl_coef else None
    do(run, 0, ["advantage"])
    table = rows(run.table(0, "advantage", "advantages"))
    response = rows(run.table(0, "rollout", "responses"))
    masks = counted_masks(response, run.config.algorithm)
    return table, response, masks


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("alone", [False, True])
def test_the_gap_to_the_teacher_comes_off_the_rows_own_advantage(
    models, task, tmp_path, name, alone
):
    found = []
    for run_name, opd in {
        "plain": {},
        "distilled": {**OPD, "opd_kl_coef": 0.5, "opd_only_reward": alone},
    }.items():
        changed = {"advantage_estimator": name, **ROWS[name], **opd}
        run = started(settings_of(models, task, tmp_path / run_name, **changed))
        made_rollout(run, 0, np.random.default_rng(2))
        if name == "ppo" and not opd:
            do(run, 0, ["score"])
        found.append((run, *advantages(run)))
    (_, plain, _, _), (run, distilled, response, masks) = found
    teacher = score_lists(run, 0)["teacher_logp"]
    for place, mask in enumerate(masks):
        if plain.token_advantage[place] is None:
            base_T = np.full(len(mask), plain.advantage[place])
        else:
            base_T = plain.token_advantage[place]
        gap_T = response.rollout_logp[place] - teacher[place]
        expected_T = np.where(mask != 0, base_T * (not alone) - 0.5 * gap_T, 0.0)
        np.testing.assert_allclose(
            distilled.token_advantage[place], expected_T, rtol=1e-5, atol=1e-5
        )
    if name == "ppo":  # returns are the critic's business
        for one, other in zip(plain.token_return, distilled.token_return, strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("name", ["reinforce_plus_plus", "grpo"])
def test_whitening_comes_after_the_gap(models, task, tmp_path, name):
    changed = {"normalize_advantages": True} if name == "grpo" else GREEN
    run = started(
        settings_of(models, task, tmp_path / "run", advantage_estimator=name, **changed, **OPD)
    )
    made_rollout(run, 0, np.random.default_rng(2))
    table, _, masks = advantages(run)
    valid_N = np.concatenate(
        [row[mask != 0] for row, mask in zip(table.token_advantage, masks, strict=True)]
    )
    ddof = 1 if name == "grpo" else 0
    assert valid_N.mean() == pytest.approx(0, abs=1e-6)
    assert valid_N.std(ddof=ddof) == pytest.approx(1, rel=1e-5)
