"""What only lays out an update's work may change in a run; a redo repeats what was."""

import multiprocessing

import numpy as np
import pytest
from process_group import joined, meeting_point
from stage_cases import do, made_rollout, settings_of, stages_after_reward, started

from relax.config import UpdateSection
from relax.errors import ConfigError
from relax.stages.perform import Warm, perform
from relax.stages.training import LAYOUT
from relax.store import Run
from relax.trainer import build
from relax.trainer.numerics import make_deterministic

PACKED = {"max_tokens_per_gpu": 40, "rollout_max_prompt_len": 30}
ONE_BY_ONE = {**PACKED, "micro_batch_size": 1, "recompute_every": 1, "offload": "cpu"}
PPO = {"advantage_estimator": "ppo", "critic_load": "critic"}


@pytest.fixture
def continued(models, task, tmp_path):
    """Start a run, or go on with it under changed settings, in a new process's place."""

    def go_on(step, name="run", warm=None, **changed) -> Run:
        run = started(settings_of(models, task, tmp_path / name, num_rollout=9, **changed))
        made_rollout(run, step, np.random.default_rng(step))
        do(run, step, stages_after_reward(run.config), warm)
        return Run.open(run.root)

    return go_on


def test_the_layout_is_what_no_key_has():
    fields = UpdateSection.model_fields.keys()
    assert fields - UpdateSection().keyed().keys() == {*LAYOUT, "use_dynamic_batch_size"}


@pytest.mark.parametrize("algorithm", [{}, PPO], ids=["grpo", "ppo"])
def test_a_redo_repeats_the_layout_that_each_update_had(continued, algorithm):
    """Without a checkpoint every update is redone, in a process that has another layout."""
    for step, layout in enumerate((PACKED, ONE_BY_ONE, PACKED)):
        run = continued(step, **algorithm, **layout)
    notes = [run.committed(step, "update").notes["layout"] for step in range(3)]
    assert [note["micro_batch_size"] for note in notes] == [0, 1, 0]
    assert [note["offload"] for note in notes] == ["none", "cpu", "none"]
    assert list((run.root / "checkpoints").iterdir()) == []
    (redone,) = measured(run, 2, "updates redone")
    assert redone == (0 if algorithm else 2)  # ppo: its score redid them
    other = continued(0, "other", **algorithm, **ONE_BY_ONE)
    assert other.policy_hash(1) != run.policy_hash(1)  # in last bits: a redo in it would stop


def test_the_layout_is_no_reason_to_refuse_a_run(continued):
    """The advice of the error that ended it can be followed, and what was paid for is kept."""
    run = continued(0, **PACKED)
    kept = run.committed(0, "update")
    run = continued(1, **{**PACKED, "max_tokens_per_gpu": 4000, "recompute_every": 1})
    assert run.committed(0, "update") == kept
    with pytest.raises(ConfigError, match=r"a run with other settings: update\.lr"):
        continued(2, **PACKED, lr=1.0)


def update_of_a_rank(rank, port, root, step):
    """What a rank of two does in a job of an update."""
    make_deterministic(1)
    with joined(rank, 2, port, timeout_s=60):
        perform(str(root), step, "update", f"attempt{step}")


@pytest.mark.integration
def test_several_ranks_move_to_another_layout_together(models, task, tmp_path):
    layouts = (PACKED, {**PACKED, "micro_batch_size": 2, "offload": "cpu"})
    context = multiprocessing.get_context("spawn")
    for step, layout in enumerate(layouts):
        run = started(settings_of(models, task, tmp_path / "run", num_rollout=9, **layout))
        made_rollout(run, step, np.random.default_rng(step))
        do(run, step, ["advantage"])
        arguments = (meeting_point(), run.root, step)
        ranks = [context.Process(target=update_of_a_rank, args=(r, *arguments)) for r in range(2)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(120)
        assert [process.exitcode for process in ranks] == [0, 0]
    notes = [run.committed(step, "update").notes["layout"] for step in range(2)]
    assert [note["offload"] for note in notes] == ["none", "cpu"]
    assert measured(run, 1, "updates redone") == [1]
    assert list((run.root / "checkpoints").iterdir()) == []


def measured(run, step, measure):
    return [value for name, value, _ in run.committed(step, "update").timing if name == measure]


def test_from_a_checkpoint_the_models_files_are_not_read(continued, monkeypatch):
    changed = {"save_interval": 1, **PPO}
    warm = Warm()
    for step in range(2):
        straight = continued(step, "straight", warm, **changed)
    continued(0, "cold", **changed)
    monkeypatch.setattr(build, "read_weights", lambda *_: pytest.fail("read"))
    cold = continued(1, "cold", **changed)
    assert cold.policy_hash(2) == straight.policy_hash(2)
    notes = [run.committed(1, "update").notes["critic"] for run in (cold, straight)]
    assert notes[0] == notes[1]
