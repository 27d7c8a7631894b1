"""A run goes on with the functions that it began with, in the flow's process and in jobs."""

from pathlib import Path

import pytest

from flows import train
from relax.errors import ConfigError
from relax.flags import load_config
from relax.store import Run
from tasks.stage import perform

pytestmark = pytest.mark.integration
REWARD = "def score(response_text, label):\n    return 3.0\n"


@pytest.fixture
def mine(tmp_path):
    path = tmp_path / "rew.py"
    path.write_text(REWARD)
    return path


def edited_after_step_0(mine: Path):
    """Run stages as flows do, with another reward in the file from step 1 on."""

    def do(session, step, stage):
        if (step, stage) == (1, "rollout"):
            mine.write_text(REWARD.replace("3.0", "5.0"))
        return perform(session, step, stage)

    return do


def rewards(run_dir, step):
    return set(Run.open(run_dir).table(step, "reward", "rewards")["reward"].to_pylist())


def test_a_function_that_is_edited_stops_a_run_in_one_process(settings, mine):
    config = load_config(None, {**settings, "custom_rm_path": f"{mine}:score"})
    with pytest.raises(ConfigError, match=r"rew\.py changed since the run began; put it back as"):
        train.run(config, edited_after_step_0(mine))
    run = Run.open(settings["run_dir"])
    assert (run.num_updates(), run.manifest(1, "reward")) == (1, None)
    assert rewards(run.root, 0) == {3.0}
    mine.write_text(REWARD)
    train.run(config, perform)
    assert rewards(run.root, 1) == {3.0}


def test_jobs_take_the_copy_and_import_modules_as_the_flow_does(
    settings, mine, tmp_path, monkeypatch
):
    package = tmp_path / "mods" / "relax_test_shaping"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "factor.py").write_text("FACTOR = 0.5\n")
    (package / "shaping.py").write_text(
        "from relax_test_shaping.factor import FACTOR\n\n"
        "def halved(reward_B, group_id_B):\n    return reward_B * FACTOR\n"
    )
    monkeypatch.syspath_prepend(package.parent)
    monkeypatch.setenv("PYTHONPATH", str(package.parent))
    given = {
        "custom_rm_path": f"{mine}:score",
        "custom_reward_post_process_path": "relax_test_shaping.shaping:halved",
        "reward_placement": "job",
    }
    train.run(load_config(None, {**settings, **given}), edited_after_step_0(mine))
    assert [rewards(settings["run_dir"], step) for step in (0, 1)] == [{1.5}, {1.5}]
