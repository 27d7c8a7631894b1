"""skip_zero_advantage: the same gradients, weights and loss, with fewer responses gone through."""

from pathlib import Path

import numpy as np
import pytest

from relax.algorithms.loss import StepCounts
from relax.algorithms.rules import check
from relax.errors import ConfigError
from relax.flags import load_config
from relax.stages.mismatch import LARGEST, MEAN
from relax.stages.update import actor_step, moving
from relax.trainer.actor import Actor
from relax.trainer.options import TrainerOptions
from relax.trainer.sequences import TrainSequence

ROWS = ("grpo", "cispo", "gspo", "sapo", "m2po", "dr_grpo")


def sequences():
    """Twelve ragged responses of which half have advantage 0."""
    rng = np.random.default_rng(0)
    made = []
    for i in range(12):
        length = int(rng.integers(1, 9))
        advantage = [0.0, 1.5, 0.0, -0.7][i % 4]
        made.append(
            TrainSequence(
                sample_id=i,
                tokens=rng.integers(3, 60, size=4 + length),
                response_len=length,
                fields={
                    "mask": np.ones(length, np.float32),
                    "advantage": np.full(length, advantage, np.float32),
                    "rollout_logp": rng.normal(-1, 0.3, length).astype(np.float32),
                    "old_logp": rng.normal(-4, 0.1, length).astype(np.float32),
                },
            )
        )
    return made


@pytest.fixture(scope="module")
def model():
    """The model that the recipes come with; nobody writes there."""
    return Path(__file__).parents[3] / "recipes/tiny_qwen3"


@pytest.mark.parametrize("name", ROWS)
def test_same_step(name, model):
    batch = sequences()
    counts = StepCounts(sum(s.response_len for s in batch), len(batch), 8)
    trained, metrics = {}, {}
    for skipping in (False, True):
        given = {"advantage_estimator": name, "skip_zero_advantage": skipping}
        config = load_config(None, given | {"rollout_batch_size": 3, "n_samples_per_prompt": 4})
        actor = Actor.load(model, TrainerOptions(lr=1e-4), num_schedule_steps=2)
        for _ in range(2):
            metrics[skipping] = actor_step(actor, batch, config, counts, is_first=False)
        trained[skipping] = {n: w.full_tensor() for n, w in actor._model.weights.items()}
    for weight, other in zip(trained[False].values(), trained[True].values(), strict=True):
        assert (weight - other).norm() <= 1e-6 * weight.norm()
    assert "train/ppo_kl" in metrics[False] and "train/ppo_kl" not in metrics[True]
    clipped = ("train/pg_clipfrac_pos", "train/pg_clipfrac_neg")
    for metric in ("train/loss", "train/grad_norm", "train/silenced_frac", *clipped):
        assert metrics[True][metric] == pytest.approx(metrics[False][metric], rel=1e-5, abs=1e-7)
    for skipping, seen in ((False, batch), (True, moving(batch))):
        gaps = np.concatenate([s.fields["old_logp"] - s.fields["rollout_logp"] for s in seen])
        assert metrics[skipping][MEAN] == pytest.approx(np.abs(gaps).mean(), rel=1e-5)
        assert metrics[skipping][LARGEST] == pytest.approx(np.abs(gaps).max(), rel=1e-5)


def test_half_of_the_responses_are_left_out():
    assert [s.sample_id for s in moving(sequences())] == [1, 3, 5, 7, 9, 11]
    silent = [s for s in sequences() if s.sample_id % 2 == 0]
    assert [s.sample_id for s in moving(silent)] == [0]


@pytest.mark.parametrize("setting", [{"entropy_coef": 0.1}, {"use_kl_loss": True}])
def test_refused_where_every_token_moves(setting):
    config = load_config(None, {"skip_zero_advantage": True, "ref_load": "x", **setting})
    with pytest.raises(ConfigError, match="skip_zero_advantage = True: needs"):
        check(config)
