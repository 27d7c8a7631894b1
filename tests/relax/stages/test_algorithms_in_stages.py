"""Rows of the table through the real stages, on a tiny random model whose rewards vary."""

import numpy as np
import pytest

from flows.demo import prepare
from flows.opening import about
from relax.algorithms import rules
from relax.doctor.sources import fingerprints
from relax.errors import ArtifactError
from relax.flags import load_config
from relax.schema import SCORES
from relax.stages import STAGES
from relax.stages.advantage import kept
from relax.stages.keys import key_parts
from relax.stages.perform import Warm, perform
from relax.store import Output, Run, rows

NUM_GROUPS, SIZE = 4, 3


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    root = tmp_path_factory.mktemp("model")
    (root / "verifier.py").write_text(
        "def lengths(response_text, label):\n    return sum(map(ord, response_text)) % 7\n"
    )
    return root, prepare(root, "max3", 5)


@pytest.fixture
def start(model, tmp_path):
    """A new run with these settings; returns (do one stage of step 0, the run)."""

    def started(**given):
        root, base = model
        settings = {
            "run_dir": str(tmp_path / "run"),
            "hf_checkpoint": str(base),
            "prompt_data": str(root / "task/train.jsonl"),
            "custom_rm_path": f"{root}/verifier.py:lengths",
            "rollout_batch_size": NUM_GROUPS,
            "n_samples_per_prompt": SIZE,
            "rollout_max_response_len": 5,
            "lr": 1e-2,
            **given,
        }
        if given.get("ref_load"):
            settings["ref_load"] = str(base)
        config = load_config(None, settings)
        rules.check(config)
        run = Run.start(config, fingerprints(config), about(10))
        warm = Warm()
        return (lambda name: perform(str(run.root), 0, name, "a1", warm)), run

    return started


def metrics_of(run, stage, step=0):
    table = rows(Run.open(run.root).table(step, stage, "metrics"))
    found = [{} for _ in range(max(table.optimizer_step, default=0) + 1)]
    for place, name, value in zip(table.optimizer_step, table.metric, table.value, strict=True):
        found[place][name] = value
    return found


def test_m2po_with_several_steps_bounds_the_later_ones(start):
    do, run = start(
        advantage_estimator="m2po",
        num_steps_per_rollout=2,
        m2po_kl2_budget=1e-9,
        m2po_miniclip_low=0.0,
        m2po_miniclip_high=0.0,
        use_tis=True,
    )
    for name in ("rollout", "reward", "score", "advantage", "update"):
        do(name)
    first, second = metrics_of(run, "update")
    assert first["train/ppo_kl_m2_before"] == 0.0 and "train/m2po_eps_low" not in first
    assert first["train/ois"] == pytest.approx(1.0, abs=1e-5)
    assert second["train/ppo_kl_m2_before"] > 1e-9
    assert second["train/ppo_kl_m2_after"] == pytest.approx(1e-9, rel=1e-6)
    assert 0 < second["train/m2po_eps_low"] < 1e-2
    assert second["train/silenced_frac"] > 0 and second["train/pg_clipfrac"] > 0
    assert second["train/tis_abs"] < 1e-4 and second["train/skipped_steps"] == 0.0


def test_micro_batches_do_not_show(start, tmp_path):
    found = []
    for size in (0, 1, 5):
        do, run = start(
            run_dir=str(tmp_path / f"run{size}"),
            advantage_estimator="gspo",
            num_steps_per_rollout=2,
            micro_batch_size=size,
            use_tis=True,
            use_opsm=True,
            entropy_coef=0.01,
        )
        for name in ("rollout", "reward", "score", "advantage", "update"):
            do(name)
        found.append(metrics_of(run, "update"))
    for others in found[1:]:
        for one, other in zip(found[0], others, strict=True):
            assert one == pytest.approx(other, rel=1e-4, abs=1e-6)


def test_rloo_diagnostics_are_written(start):
    do, run = start(advantage_estimator="rloo", calculate_per_token_loss=True)
    for name in ("rollout", "reward", "advantage"):
        do(name)
    (found,) = metrics_of(run, "advantage")
    reward = rows(run.table(0, "reward", "rewards")).reward
    assert found["rollout/rloo/baseline_mean"] == pytest.approx(reward.mean())
    table = rows(run.table(0, "advantage", "advantages"))
    assert found["rollout/rloo/adv_abs_mean"] == pytest.approx(np.abs(table.advantage).mean())
    assert table.token_advantage[0] is None
    assert {"rollout/repetition_frac", "rollout/truncated_ratio"} <= metrics_of(run, "rollout")[
        0
    ].keys()


def write_scores(run, **columns):
    output = Output(
        run.root, 0, "score", attempt="a1", key_parts=key_parts(run, 0, STAGES["score"])
    )
    ids = rows(run.table(0, "rollout", "responses")).sample_id
    output.write("scores", SCORES.table(sample_id=ids, **columns))
    output.commit()


def test_reinforce_plus_plus_reads_the_scores(start):
    do, run = start(
        advantage_estimator="reinforce_plus_plus",
        normalize_advantages=True,
        kl_coef=0.5,
        ref_load="base",
        num_steps_per_rollout=2,
    )
    do("rollout")
    do("reward")
    response = rows(run.table(0, "rollout", "responses"))
    ref = [logp - np.linspace(0, 1, len(logp)) for logp in response.rollout_logp]
    write_scores(run, old_logp=response.rollout_logp, ref_logp=ref)
    do("advantage")
    table = rows(run.table(0, "advantage", "advantages"))
    reward = rows(run.table(0, "reward", "rewards")).reward
    raw = [
        r - 0.5 * np.cumsum(np.linspace(0, 1, len(x))[::-1])[::-1]
        for r, x in zip(reward, ref, strict=True)
    ]
    every = np.concatenate(raw)
    for row_T, advantage_T in zip(raw, table.token_advantage, strict=True):
        assert advantage_T == pytest.approx((row_T - every.mean()) / every.std(), abs=1e-5)
    (found,) = metrics_of(run, "advantage")
    assert found["rollout/reinforce_pp_advantage_raw_mean"] == pytest.approx(every.mean(), rel=1e-5)
    do("update")
    assert metrics_of(run, "update")[0]["train/ois"] == pytest.approx(1.0, abs=1e-4)


def test_ppo_writes_returns_from_the_scores(start):
    do, run = start(advantage_estimator="ppo", lambd=0.5)
    do("rollout")
    do("reward")
    response = rows(run.table(0, "rollout", "responses"))
    value = [np.ones(len(logp), np.float32) for logp in response.rollout_logp]
    write_scores(run, value=value)
    do("advantage")
    table = rows(run.table(0, "advantage", "advantages"))
    reward = rows(run.table(0, "reward", "rewards")).reward
    for r, advantage_T, return_T in zip(
        reward, table.token_advantage, table.token_return, strict=True
    ):
        powers = 0.5 ** np.arange(len(return_T))[::-1]
        assert advantage_T == pytest.approx((r - 1) * powers)
        assert return_T == pytest.approx(1 + (r - 1) * powers)


def test_truncated_responses_leave_the_loss_with_mask_truncated(start):
    do, run = start(mask_truncated=True, rollout_max_response_len=1, rollout_ignore_eos=True)
    for name in ("rollout", "reward", "advantage", "update"):
        do(name)
    assert metrics_of(run, "update") == [{"train/skipped_steps": 1.0}]


def test_incomplete_groups():
    settings = load_config(None, {}).algorithm
    dropping = load_config(None, {"drop_incomplete_groups": True}).algorithm
    group_id_B = np.array([4, 4, 5, 5, 5])
    with pytest.raises(ArtifactError, match=r"group 4: 2 samples, n_samples_per_prompt = 3"):
        kept(group_id_B, 3, settings)
    assert kept(group_id_B, 3, dropping).tolist() == [False, False, True, True, True]
    with pytest.raises(ArtifactError, match="the rollout is not whole"):
        kept(group_id_B[:2], 3, dropping)
