"""The stage `sft`: what it does about a step that is not finite, and about a lost checkpoint."""

import numpy as np
import pytest
from stage_cases import do, metrics_of, settings_of, started

from relax.stages import sft
from relax.stages.training import steps_behind
from relax.trainer.learner import NonFiniteError
from relax.trainer.sequences import LossParts


@pytest.fixture
def begun(models, task, tmp_path):
    changed = {"sft_steps": 3, "sft_batch_size": 4, "save_interval": 1}
    return started(settings_of(models, task, tmp_path / "run", num_rollout=5, **changed))


@pytest.fixture
def poisoned(monkeypatch):
    """Optimizer steps, counted from the first, whose loss becomes NaN."""
    bad, taken = set(), []
    cross_entropy = sft.cross_entropy

    def faulty(num_tokens):
        loss, number = cross_entropy(num_tokens), len(taken)
        taken.append(number)

        def poison(batch):
            return LossParts(loss(batch).loss * (float("nan") if number in bad else 1.0))

        return poison

    monkeypatch.setattr(sft, "cross_entropy", faulty)
    return bad


def test_a_step_that_is_not_finite_is_skipped_and_reported(begun, poisoned, capsys):
    poisoned.add(1)
    do(begun, 0, ["sft"])
    found = metrics_of(begun, 0, "sft")
    assert [step["sft/skipped_steps"] for step in found] == [0.0, 1.0, 0.0]
    assert ["sft/lr" in step for step in found] == [True, False, True]
    assert [np.isfinite(step["sft/loss"]) for step in found] == [True, False, True]
    assert "skipped; samples with a non-finite loss: [" in capsys.readouterr().err
    assert steps_behind(begun, 1) == {"actor": 2, "critic": 0}


def test_three_in_a_row_end_it_and_leave_the_batch(begun, poisoned):
    poisoned |= {0, 1, 2}
    kept = begun.root / "inspect" / "000000"
    with pytest.raises(NonFiniteError, match=f"3 in a row: stopped; the batch is in {kept}"):
        do(begun, 0, ["sft"])
    assert begun.manifest(0, "sft") is None
    assert 0 < len(list(kept.glob("sample-*.npz"))) <= 4


def test_a_damaged_checkpoint_is_gone_around(begun, capsys):
    for step in range(2):
        do(begun, step, ["sft"])
    (newest,) = begun.root.glob("checkpoints/000002.*")
    data = max(newest.glob("actor/*.distcp"), key=lambda path: path.stat().st_size)
    data.write_bytes(bytes(data.stat().st_size))
    do(begun, 2, ["sft"])
    assert "damaged: actor/" in capsys.readouterr().err
    assert steps_behind(begun, 3) == {"actor": 9, "critic": 0}
