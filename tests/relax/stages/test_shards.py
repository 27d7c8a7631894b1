"""A rollout that is killed in the middle samples only what is missing, and comes out the same."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from rollout_cases import do, responses_of

from relax.engines.embedded import TransformersEngine
from relax.schema import RESPONSES
from relax.stages import STAGES
from relax.stages.keys import key_parts
from relax.stages.perform import perform_all, perform_shards
from relax.store import Output
from relax.store.manifest import digest
from relax.store.parts import Parts, finished

SHARDS, PER_SHARD = 4, 6  # of two groups of three
PLACES = (
    *[["sampling", number] for number in range(SHARDS)],
    ["renaming", "0001", "before"],
    ["renaming", "0001", "after"],
    ["renaming", "0003", "after"],
    ["renaming", "rollout", "before"],
    ["renaming", "rollout", "after"],
)
KEPT = (0, 1, 2, 3, 1, 2, 4, 4, 4)
"""Shards that are whole after each of these deaths."""


@pytest.fixture(scope="module")
def killed(stage_model, tmp_path_factory):
    """What became of the undisturbed run, and of each that was killed and run again."""
    from rollout_cases import settings_of, write_prompts

    folder = tmp_path_factory.mktemp("killed")
    prompts = write_prompts(folder / "prompts.jsonl", ["mixed"] * 9)
    settings = settings_of(stage_model, prompts, folder / "run") | {
        "rollout_batch_size": 8, "n_samples_per_prompt": 3, "rollout_shard_groups": 2,
    }  # fmt: skip
    asked = {"folder": str(folder / "runs"), "settings": settings, "places": PLACES}
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("kill_driver.py"), json.dumps(asked)],
        capture_output=True, text=True, timeout=500, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.integration
@pytest.mark.parametrize("number", range(len(PLACES)), ids=lambda n: "-".join(map(str, PLACES[n])))
def test_a_killed_rollout_loses_one_shard_and_ends_as_if_it_had_not_been(killed, number):
    whole, found, place = killed[0], killed[1 + number], PLACES[number]
    assert found["first"] == -9
    assert found["marker"] == (
        f"sampling call {place[1]}"
        if place[0] == "sampling"
        else f"{place[2]} rename of {place[1]}"
    )
    assert found["second"] == 0
    is_committed = place == ["renaming", "rollout", "after"]
    assert len(found["kept"]) == KEPT[number]
    again = [] if is_committed else whole["second sampled"][KEPT[number] * PER_SHARD :]
    assert found["second sampled"] == again
    lost = set(found["first sampled"]) & set(found["second sampled"])
    assert len(lost) <= PER_SHARD  # sampled twice: the shard that was not yet committed
    for fact in ("key", "content", "files"):
        assert found[fact] == whole[fact]
    if not is_committed:
        assert found["left"] == ["rollout"]


def test_a_rollout_of_one_shard_leaves_no_parts(start, tmp_path):
    run = start()
    do(run)
    assert [p.name for p in (run.root / "steps/000000").iterdir()] == ["rollout"]


def test_what_finished_before_an_error_is_not_sampled_again(start, monkeypatch, capsys):
    run = start(rollout_shard_groups=1)
    whole, calls = TransformersEngine.sample, []

    def third_fails(self, requests, params):
        calls.append([r.seed for r in requests])
        if len(calls) == 3:
            raise RuntimeError("a bug")
        return whole(self, requests, params)

    monkeypatch.setattr(TransformersEngine, "sample", third_fails)
    with pytest.raises(RuntimeError, match="a bug"):
        do(run)
    do(run)
    assert [len(call) for call in calls] == [2] * 5  # two, the one that failed, and the last two
    assert calls[2] == calls[3] and calls[4] not in calls[:4]
    assert "rollout 0: 4/8 responses were finished before" in capsys.readouterr().err
    timing = {name: value for name, value, _ in run.committed(0, "rollout").timing}
    assert (timing["responses asked"], timing["responses reused"]) == (8, 4)


def test_a_damaged_shard_is_made_again(start, monkeypatch, capsys):
    run = start(rollout_shard_groups=2)
    commit = Parts.commit

    def damaged(self, shard, table):
        commit(self, shard, table)
        path = self._folder / "0000" / "responses.arrow"
        path.write_bytes(path.read_bytes()[:-100])
        raise KeyboardInterrupt

    monkeypatch.setattr(Parts, "commit", damaged)
    with pytest.raises(KeyboardInterrupt):
        do(run)
    monkeypatch.setattr(Parts, "commit", commit)
    do(run)
    assert "the shard is made again" in capsys.readouterr().err
    assert len(responses_of(run).tokens) == 8


def test_shards_made_apart_are_committed_by_who_finds_them_all(start, tmp_path):
    run = start(rollout_shard_groups=1)
    mine = lambda *shards: perform_shards(  # noqa: E731
        str(run.root), 0, "rollout", shards, attempt=f"test-{shards[0]}", stop=lambda: False
    )
    stopped = {"attempt": "test", "stop": lambda: True}
    assert perform_shards(str(run.root), 0, "rollout", [0], **stopped) is False
    assert mine(1, 3) and mine(2)
    assert not (run.root / "steps/000000/rollout").exists()
    key = digest(key_parts(run, 0, STAGES["rollout"]))
    assert finished(run.root, 0, "rollout", key) == {1, 2, 3}
    assert mine(0)
    whole = start(rollout_shard_groups=1, run_dir=str(tmp_path / "whole"))
    do(whole)
    assert run.committed(0, "rollout").content == whole.committed(0, "rollout").content
    assert [p.name for p in (run.root / "steps/000000").iterdir()] == ["rollout"]
    assert mine(2)  # come late: it is there already
    assert [p.name for p in (run.root / "steps/000000").iterdir()] == ["rollout"]


def asked_after(number):
    """A wish to stop that comes with the `number`-th look for one."""
    looks = []
    return lambda: len(looks.append(1) or looks) >= number


def test_a_rollout_asked_to_stop_keeps_its_finished_shards(start, tmp_path):
    """It is looked for before the stage and after each shard; the next start makes the rest."""
    run = start(rollout_shard_groups=1)
    names, root = ("rollout", "reward"), str(run.root)
    assert perform_all(root, 0, names, "first", asked_after(4)) is False
    key = digest(key_parts(run, 0, STAGES["rollout"]))
    assert finished(run.root, 0, "rollout", key) == {0, 1, 2}
    assert [p.name for p in (run.root / "steps/000000").iterdir()] == [".rollout.parts"]
    assert perform_all(root, 0, names, "second", lambda: False) is True
    timing = {name: value for name, value, _ in run.committed(0, "rollout").timing}
    assert (timing["responses asked"], timing["responses reused"]) == (8, 6)
    whole = start(rollout_shard_groups=1, run_dir=str(tmp_path / "whole"))
    do(whole)
    assert run.committed(0, "rollout").content == whole.committed(0, "rollout").content
    assert run.committed(0, "reward").attempt == "second"


def test_an_element_asked_to_stop_in_its_shards_has_work_left(start):
    run = start(rollout_shard_groups=1)
    mine = lambda stop: perform_shards(  # noqa: E731
        str(run.root), 0, "rollout", [0, 2], attempt="test", stop=stop
    )
    assert mine(asked_after(2)) is False
    key = digest(key_parts(run, 0, STAGES["rollout"]))
    assert finished(run.root, 0, "rollout", key) == {0}
    assert mine(lambda: False) is True
    assert finished(run.root, 0, "rollout", key) == {0, 2}


def test_a_wish_to_stop_in_the_last_shard_costs_nothing(start):
    run = start(rollout_shard_groups=1)
    assert perform_all(str(run.root), 0, ["rollout"], "test", asked_after(5)) is True
    assert run.committed(0, "rollout").attempt == "test"


def test_shards_of_another_key_are_not_read(tmp_path):
    made = Output(tmp_path, 0, "rollout", attempt="a", key_parts={"is": 1})
    Parts(made, "responses").commit(0, RESPONSES.schema.empty_table())
    assert Parts(made, "responses").read(0) is not None
    other = Output(tmp_path, 0, "rollout", attempt="b", key_parts={"is": 2})
    assert Parts(other, "responses").read(0) is None
