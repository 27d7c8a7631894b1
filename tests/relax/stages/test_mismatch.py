"""Engine against trainer: the largest difference, its mean, k3, and a warning over a threshold."""

import math

import pytest
import torch
from rollout_cases import plain_logp, prompts_of, responses_of, train_all

from relax.analytics import open_run
from relax.stages.mismatch import LARGEST, MEAN, Mismatch
from relax.trainer.ranks import ensure_group
from relax.trainer.sequences import LossParts


def test_the_largest_difference_of_valid_tokens_over_micro_batches():
    ensure_group()
    mismatch, seen = Mismatch(), []

    def loss(tensors):
        seen.append(tensors)
        return LossParts(torch.zeros(()))

    watched = mismatch.watching(loss)
    mask_BT = torch.tensor([[1.0, 1.0, 0.0]])
    engine_BT = torch.tensor([[-1.0, -2.0, 5.0]])
    watched({"logp_BT": engine_BT + 0.25, "rollout_logp_BT": engine_BT, "mask_BT": mask_BT})
    assert mismatch.metrics()[LARGEST] == 0.25
    old_BT = torch.tensor([[-1.0, -1.5, math.nan]])  # before the updates: it counts, not logp
    watched(
        {
            "logp_BT": engine_BT - 9,
            "old_logp_BT": old_BT,
            "rollout_logp_BT": engine_BT,
            "mask_BT": mask_BT,
        }
    )
    assert mismatch.metrics()[LARGEST] == 0.5
    watched({"logp_BT": engine_BT, "rollout_logp_BT": engine_BT + 7, "mask_BT": 0 * mask_BT})
    assert len(seen) == 3
    found = mismatch.metrics()  # gaps: .25, .25, 0, .5
    assert found[LARGEST] == 0.5
    assert found[MEAN] == 0.25
    assert found["train/mismatch_kl"] == -0.25
    k3 = [math.exp(d) - 1 - d for d in (0.25, 0.25, 0.0, 0.5)]
    assert found["train/mismatch_k3_kl"] == pytest.approx(sum(k3) / 4)


def test_where_the_engines_stand_in_for_the_old_ones_this_pass_is_compared():
    ensure_group()
    mismatch = Mismatch(own=True)
    engine_BT, mask_BT = torch.tensor([[-1.0, -2.0]]), torch.ones(1, 2)
    mismatch.see(
        {
            "logp_BT": engine_BT - 0.5,
            "old_logp_BT": engine_BT,
            "rollout_logp_BT": engine_BT,
            "mask_BT": mask_BT,
        }
    )
    assert mismatch.metrics()[MEAN] == mismatch.metrics()[LARGEST] == 0.5


def metrics_of(run, step):
    answer = open_run(run.root).sql(
        f"SELECT metric, value FROM metrics WHERE stage = 'update' AND step = {step}"
    )
    return dict(answer.fetchall())


def test_every_step_measures_it_and_warns_above_the_threshold(base_settings, stage_model, capsys):
    changes = {"num_rollout": 2, "rollout_mismatch_warning": 0.0, "rollout_temperature": 0.7}
    run = train_all({**base_settings, **changes})
    found = metrics_of(run, 0)
    prompts, responses = prompts_of(run), responses_of(run)
    gaps = []
    for place in range(8):
        prompt = prompts.prompt_tokens[place // 2].tolist()
        exact = plain_logp(stage_model, prompt, responses.tokens[place].tolist(), 0.7)
        gaps += abs(exact - responses.rollout_logp[place]).tolist()
    assert found[LARGEST] == pytest.approx(max(gaps), abs=3e-6)
    assert found[MEAN] == pytest.approx(sum(gaps) / len(gaps), abs=1e-6)
    assert 0 <= found["train/mismatch_k3_kl"] < 1e-9
    assert found[LARGEST] < 1e-5  # the same weights, in fp32
    for step in (0, 1):
        assert metrics_of(run, step)[LARGEST] < 1e-5
    words = "update: step 0: engine and trainer differ by 0.0000 nats a token on average"
    assert f"warning: {words}" in capsys.readouterr().err
    recorded = open_run(run.root).sql("SELECT step, text FROM timing WHERE measure = 'warning'")
    assert [(s, t.startswith("update: step")) for s, t in recorded.fetchall()] == [
        (0, True), (1, True),
    ]  # fmt: skip


def test_no_warning_below_the_threshold(base_settings, capsys):
    run = train_all(base_settings)
    assert "differ by" not in capsys.readouterr().err
    assert all(name != "warning" for name, _, _ in run.committed(0, "update").timing)
