"""A step computed again is the one that was committed, or what differs is named."""

import json

import pyarrow.compute as pc
import pytest

from flows import train
from relax.cli import main
from relax.flags import load_config
from relax.store import Run
from relax.store.arrow import content_hash, write_table
from tasks.stage import perform

DYNAMIC = {
    "dynamic_sampling_filter_path": "reward_spread",
    "over_sampling_batch_size": 4,
    "dynamic_sampling_max_rounds": 3,
    "custom_rm_path": "reward.py:score",
}
REWARD = """
def score(response_text, label):
    return float(len(set(response_text)))
"""


@pytest.fixture
def made(settings, tmp_path, monkeypatch):
    """Three steps, with scores, evaluation and rounds; a checkpoint behind the second alone."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "reward.py").write_text(REWARD)
    changed = {
        "num_rollout": 3,
        "save_interval": 2,
        "num_steps_per_rollout": 2,
        "n_samples_per_prompt": 4,
        "eval_prompt_data": settings["prompt_data"].replace("train", "held_out"),
        "eval_interval": 1,
    }
    train.run(load_config(None, {**settings, **changed, **DYNAMIC}), perform)
    return Run.open(settings["run_dir"])


def said(run, capsys, step):
    capsys.readouterr()
    code = main(["replay", str(run.root), "--step", str(step)])
    return code, capsys.readouterr().out.splitlines()


def test_every_stage_of_a_step_is_the_same(made, capsys):
    code, lines = said(made, capsys, 2)
    assert code == 0, lines
    stages = {line.removesuffix(": the same") for line in lines}
    wanted = {
        "rollout.1",
        "reward.1",
        "rollout",
        "reward",
        "score",
        "advantage",
        "update",
        "evaluate",
    }
    assert stages >= wanted
    assert not list(made.root.glob(".replay-*"))


def test_what_differs_is_named(made, capsys):
    """As if another machine had made the policy."""
    edit(made, "update", lambda told: told["policy"].update(hash="0" * 64))
    code, lines = said(made, capsys, 2)
    assert code == 1
    policy = Run.open(made.root).manifest(2, "update").policy
    (line,) = [line for line in lines if not line.endswith(": the same")]
    assert line.startswith("update: policy 3: 000000000000 was committed, now ")
    assert policy.hash == "0" * 64


def edit(run, stage, change):
    path = run.root / f"steps/000002/{stage}/manifest.json"
    told = json.loads(path.read_text())
    change(told)
    path.write_text(json.dumps(told))


def test_another_table_is_told_by_its_columns(made, capsys, tmp_path):
    path = made.root / "steps/000002/advantage"
    table = made.table(2, "advantage", "advantages")
    place = table.schema.get_field_index("advantage")
    other = table.set_column(place, table.schema.field(place), pc.add(table["advantage"], 1))
    write_table(path / "new", other)
    size = (path / "new").stat().st_size
    (path / "new").replace(path / "advantages.arrow")  # the old one is memory-mapped
    entry = {"hash": content_hash(other), "bytes": size}
    edit(made, "advantage", lambda told: told["tables"]["advantages"].update(entry))
    code, lines = said(made, capsys, 2)
    assert code == 1
    assert [line for line in lines if not line.endswith(": the same")] == [
        "advantage: advantages: advantage differ"
    ]


def test_another_layout_since_then_is_no_difference(made, capsys):
    """The update is laid out as it was, whatever the run does by now."""
    config = made.config.model_dump()
    accepted = made.root / "config" / "0002.json"
    record = json.loads((made.root / "config" / "0001.json").read_text())
    config["update"] |= {"micro_batch_size": 1, "use_dynamic_batch_size": False}
    accepted.write_text(json.dumps(record | {"config": config}))
    (made.root / ".replay-killed").mkdir()
    code, lines = said(made, capsys, 2)
    assert code == 0, lines
    assert not (made.root / ".replay-killed").exists()


def test_a_policy_that_is_gone_is_told(made, capsys):
    assert main(["replay", str(made.root), "--step", "1"]) == 1
    assert "removed by retention" in capsys.readouterr().err


def test_a_step_that_is_not_there(made, capsys):
    assert main(["replay", str(made.root), "--step", "7"]) == 2
    assert f"--step 7: nothing of it is committed in {made.root}" in capsys.readouterr().err
