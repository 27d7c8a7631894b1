"""What a stage's key depends on, and a stage that was made from something else."""

import json
from pathlib import Path

import pytest

from relax.errors import ArtifactError
from relax.flags import load_config
from relax.schema import METRICS
from relax.stages import STAGES, perform
from relax.stages.keys import done, key_parts
from relax.stages.perform import Inputs, Warm
from relax.store import Output, Run
from relax.store.commit import POLICIES

SOURCES = {"model": "m", "tokenizer": "t", "prompts": "p"}


def start(root: Path, **settings) -> Run:
    config = load_config(None, {"run_dir": str(root), "hf_checkpoint": "base", **settings})
    return Run.start(config, dict(SOURCES), {"command": "test", "schedule_steps": 5})


def write_metrics(output: Output, value: float = 0.0) -> None:
    output.write("metrics", METRICS.table(optimizer_step=[0], metric=["m"], value=[value]))


def commit(run: Run, step: int, stage: str, value: float = 0.0) -> None:
    parts = key_parts(run, step, STAGES[stage])
    output = Output(run.root, step, stage, attempt="a", key_parts=parts)
    write_metrics(output, value)
    if STAGES[stage].continues:
        output.publish(POLICIES, step + 1, lambda directory: f"hash of {value}")
    output.commit()


def test_a_stage_is_done_under_its_key(tmp_path):
    run = start(tmp_path)
    assert done(run, 0, "rollout") is None
    commit(run, 0, "rollout")
    assert done(run, 0, "rollout") == run.committed(0, "rollout")


def test_paths_hosts_and_display_are_in_no_key(tmp_path):
    runs = [
        start(tmp_path / name, num_rollout=n, hf_checkpoint=name, placement=place)
        for name, n, place in (("one", 3, "inline"), ("two", 4, "job"))
    ]
    one, two = (key_parts(run, 0, STAGES["rollout"]) for run in runs)
    assert one == two
    assert str(tmp_path) not in json.dumps(one)


def test_a_stage_made_from_other_inputs_is_refused_naming_them(tmp_path):
    run = start(tmp_path)
    commit(run, 0, "rollout", 1.0)
    commit(run, 0, "reward")
    (tmp_path / "steps/000000/rollout").rename(tmp_path / "aside")
    again = Run.open(tmp_path)
    commit(again, 0, "rollout", 2.0)
    said = r'steps/000000/reward: made from something else .*: inputs.rollout: "\w+\.\.\w+" -> "'
    with pytest.raises(ArtifactError, match=said):
        done(again, 0, "reward")


def test_a_stage_made_with_another_lr_is_refused_naming_it(tmp_path):
    """As by a job that an earlier flow, with other settings, left running."""
    old = start(tmp_path, lr=1e-3)
    for stage in ("rollout", "reward", "advantage"):
        commit(old, 0, stage)
    commit(old, 0, "update")
    path = tmp_path / "config" / "0001.json"
    record = json.loads(path.read_text())
    record["config"]["update"]["lr"] = 1e-4
    (tmp_path / "config" / "0002.json").write_text(json.dumps(record))
    run = Run.open(tmp_path)
    assert done(run, 0, "advantage") is not None, "what does not read lr stays"
    said = "config.update.lr: 0.001 -> 0.0001; put that back, or start another --run-dir"
    with pytest.raises(ArtifactError, match=said):
        done(run, 0, "update")


def test_an_update_follows_from_the_one_before(tmp_path):
    run = start(tmp_path)
    for step in range(2):
        for stage in ("rollout", "reward", "advantage", "update"):
            commit(run, step, stage, float(step))
    before = run.committed(0, "update")
    assert key_parts(run, 1, STAGES["update"])["continues"] == {
        "key": before.key,
        "content": before.content,
    }
    assert key_parts(run, 1, STAGES["rollout"])["sources"]["policy"] == "hash of 0.0"


def test_a_policy_has_one_maker(tmp_path):
    run = start(tmp_path)
    commit(run, 0, "sft")
    with pytest.raises(ArtifactError, match="policy 1 was made by sft; for update give another"):
        done(run, 0, "update")
    assert done(run, 0, "rollout") is None


# --- perform: attempts that are not alone, or fail -------------------------------------------


def performed(monkeypatch, run: Run, stage) -> object:
    monkeypatch.setattr(perform, "_load", lambda entry: stage)
    return perform.perform(str(run.root), 0, "rollout", "mine")


def test_an_attempt_that_is_overtaken_and_swept_returns_the_winners(tmp_path, monkeypatch):
    run = start(tmp_path)

    def stage(config, inputs: Inputs, output: Output, warm: Warm) -> None:
        write_metrics(output, 1.0)
        commit(run, 0, "rollout", 2.0)
        run.tidy(run.committed(0, "rollout"))
        write_metrics(output, 3.0)  # its directory is gone

    assert performed(monkeypatch, run, stage) == run.committed(0, "rollout")
    assert sorted(p.name for p in (tmp_path / "steps/000000").iterdir()) == ["rollout"]


@pytest.mark.parametrize("rank", [0, 1])
def test_one_of_several_ranks_that_is_overtaken_fails_with_the_others(tmp_path, monkeypatch, rank):
    """They wait in collectives, and would take the winner's manifest for one of theirs."""
    run = start(tmp_path)
    monkeypatch.setattr(perform, "_size", lambda: 2)
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setattr(perform, "_from_first", lambda value: value)

    def stage(config, inputs: Inputs, output: Output, warm: Warm) -> None:
        commit(run, 0, "sft", 2.0)
        run.tidy(run.committed(0, "sft"))
        raise FileNotFoundError(2, "swept")

    monkeypatch.setattr(perform, "_load", lambda entry: stage)
    with pytest.raises(FileNotFoundError, match="swept"):
        perform.perform(str(run.root), 0, "sft", "mine")
    assert [p.name for p in (tmp_path / "steps/000000").iterdir()] == ["sft"]
    monkeypatch.setenv("RANK", "0")
    assert perform.perform(str(run.root), 0, "sft", "next").attempt == "a"


@pytest.mark.parametrize("error", [ArtifactError("bad"), RuntimeError("bad"), KeyboardInterrupt()])
def test_an_attempt_that_fails_leaves_nothing_and_can_be_repeated(tmp_path, monkeypatch, error):
    run = start(tmp_path)

    def fail(config, inputs: Inputs, output: Output, warm: Warm) -> None:
        write_metrics(output)
        raise error

    with pytest.raises(type(error)):
        performed(monkeypatch, run, fail)
    assert list((tmp_path / "steps/000000").iterdir()) == []
    stage = lambda config, inputs, output, warm: write_metrics(output, 1.0)  # noqa: E731
    assert performed(monkeypatch, run, stage).attempt == "mine"


def test_what_is_done_is_not_performed_again(tmp_path, monkeypatch):
    run = start(tmp_path)
    commit(run, 0, "rollout")
    assert performed(monkeypatch, run, None) == run.committed(0, "rollout")
