"""A fork has the steps of the run before it, to the bit, and goes its own way from there."""

import json
import os
from pathlib import Path

import pytest
from crash_lab import flags

from flows import train
from relax.cli import main
from relax.flags import load_config
from relax.store import Run
from tasks.stage import perform

STAGES = ("rollout", "reward", "advantage", "update")


def do(settings, **changed):
    train.run(load_config(None, {**settings, **changed}), perform)
    return Run.open({**settings, **changed}["run_dir"])


@pytest.fixture(scope="module")
def made(small_settings, tmp_path_factory):
    """A run of four steps with checkpoints behind steps 2, 3 and 4, and its settings."""
    saved = {"num_rollout": 4, "save_interval": 1, "max_actor_ckpt_to_keep": 3}
    settings = {**small_settings, **saved, "run_dir": str(tmp_path_factory.mktemp("run") / "run")}
    return do(settings), settings


@pytest.fixture
def forked(made, tmp_path, capsys):
    """That run, and the settings of its fork at step 3."""
    origin, settings = made
    new = tmp_path / "new"
    assert main(["fork", str(origin.root), str(new), "--at-step", "3"]) == 0
    assert f"{new}: steps 0 to 2 of {origin.root}; " in capsys.readouterr().out
    return origin, {**settings, "run_dir": str(new)}


def contents(run, step):
    return {stage: run.committed(step, stage).content for stage in STAGES}


def test_with_the_same_settings_it_repeats_the_run(forked):
    origin, settings = forked
    fork = do(settings)
    for step in range(4):
        assert contents(fork, step) == contents(origin, step)
    assert fork.policy_hash(4) == origin.policy_hash(4)


def test_other_settings_hold_from_its_step_on(forked, capsys):
    origin, settings = forked
    changed = {"lr": 3e-3, "num_rollout": 5, "num_steps_per_rollout": 2, "n_samples_per_prompt": 4}
    fork = do(settings, **changed)
    for step in range(3):
        assert contents(fork, step) == contents(origin, step)
        assert fork.manifest(step, "score") is None
    assert fork.committed(3, "score")
    assert fork.table(3, "rollout", "responses").num_rows == 8
    assert fork.policy_hash(3) == origin.policy_hash(3)
    assert fork.num_updates() == 5
    assert do(settings, **changed).policy_hash(5) == fork.policy_hash(5)
    assert main(["verify", str(fork.root)]) == 0


def test_it_goes_on_where_the_run_stopped_reading(forked):
    _, settings = forked
    fork = do(settings, rollout_batch_size=3, num_rollout=5)
    cursors = [fork.table(s, "rollout", "prompts")["cursor"].to_pylist() for s in range(5)]
    assert cursors == [[0, 1], [2, 3], [4, 5], [6, 7, 8], [9, 10, 11]]


def test_its_own_steps_are_bound_to_their_settings_as_ever(forked, capsys):
    _, settings = forked
    do(settings, lr=3e-3)
    assert main(["train", "--no-prefect", *flags({**settings, "lr": 1e-3})]) == 2
    said = capsys.readouterr().err
    assert "update.lr: 0.003 -> 0.001" in said and "relax fork" in said


def test_the_first_run_may_go(forked):
    """Hard links keep what both hold."""
    origin, settings = forked
    (policy,) = (origin.root / "policies").glob("000003.*/model.safetensors")
    (same,) = Path(settings["run_dir"]).glob("policies/000003.*/model.safetensors")
    assert os.path.samefile(policy, same)
    origin.root.rename(origin.root.with_name("gone"))
    try:
        assert do(settings).num_updates() == 4
    finally:
        origin.root.with_name("gone").rename(origin.root)


def test_without_its_checkpoint_it_does_not_start_over(forked, capsys):
    _, settings = forked
    (checkpoint,) = [path for _, path, _ in Run.open(settings["run_dir"]).checkpoints(3)]
    (checkpoint / "actor" / "files.json").unlink()
    with pytest.raises(ValueError, match="no whole checkpoint of policy 3, where it was forked"):
        do(settings)


@pytest.mark.parametrize(("step", "steps"), [("1", "2, 3, 4"), ("9", "2, 3, 4")])
def test_a_step_without_a_checkpoint_is_refused(forked, tmp_path, capsys, step, steps):
    origin, _ = forked
    assert main(["fork", str(origin.root), str(tmp_path / "b"), "--at-step", step]) == 2
    said = capsys.readouterr().err
    assert (
        f"--at-step {step}: {origin.root} has no checkpoint there; steps with one: {steps}" in said
    )
    assert not (tmp_path / "b").exists()


def test_a_directory_that_is_there_is_refused(forked, capsys):
    origin, settings = forked
    before = json.loads((origin.root / "run.json").read_text())
    assert main(["fork", str(origin.root), settings["run_dir"], "--at-step", "3"]) == 2
    assert f"{settings['run_dir']}: exists; give a directory" in capsys.readouterr().err
    assert json.loads((origin.root / "run.json").read_text()) == before


def test_a_reference_that_the_fork_has_not_is_told_at_the_start(forked):
    _, settings = forked
    kl = {"use_kl_loss": True, "ref_load": settings["hf_checkpoint"]}
    with pytest.raises(
        ValueError, match="--ref-update-interval = 2: the reference of step 3 would"
    ):
        do(settings, ref_update_interval=2, **kl)
    assert do(settings, ref_update_interval=3, **kl).num_updates() == 4


def test_a_fork_to_an_algorithm_with_a_critic_is_refused(forked):
    _, settings = forked
    said = "holds no critic, and ppo needs one; go on with an algorithm without"
    with pytest.raises(ValueError, match=said):
        do(settings, advantage_estimator="ppo")


def test_a_fork_may_leave_the_critic_behind(made, tmp_path):
    _, settings = made
    origin = do({**settings, "run_dir": str(tmp_path / "ppo"), "advantage_estimator": "ppo"})
    assert main(["fork", str(origin.root), str(tmp_path / "b"), "--at-step", "3"]) == 0
    assert do({**settings, "run_dir": str(tmp_path / "b")}).num_updates() == 4


def test_the_progress_of_a_fork_begins_at_its_step(forked, capsys):
    _, settings = forked
    do(settings)
    assert "step 4/4" in capsys.readouterr().err


def test_replay_leaves_inherited_steps_to_their_run(forked, capsys):
    _, settings = forked
    fork = do(settings)
    assert main(["replay", str(fork.root), "--step", "2"]) == 2
    assert "was forked at step 3; replay earlier ones in the run" in capsys.readouterr().err
    assert main(["replay", str(fork.root), "--step", "3"]) == 0
