"""Several gloo ranks against one, on disk and in the numbers."""

import json

import pytest
from rank_jobs import die, finish, launch, reshard, steps, three_steps
from safetensors.torch import load_file

from relax.trainer.publish import policy_hash

pytestmark = pytest.mark.integration

# Ranks -> layout -> what differs from one rank with the default cuts.
LAYOUTS = {
    1: {"one": {}, "one-tied": {}},
    2: {
        "two": {"max_tokens_per_gpu": 40, "recompute_every": 1},
        "replicas": {"num_replicas": 2, "micro_batch_size": 3},
        "two-tied": {"max_tokens_per_gpu": 40},
    },
    3: {"three": {"offload": "cpu", "recompute_every": 2}},
}
SEVERAL = {name: ranks for ranks, layouts in LAYOUTS.items() for name in layouts if ranks > 1}


@pytest.fixture(scope="module")
def runs(tmp_path_factory, untied_dir, tied_dir):
    """All that several ranks can do without a new process, one launch for each number of ranks."""
    root = tmp_path_factory.mktemp("ranks")
    models = {False: untied_dir, True: tied_dir}
    moves = {1: [], 2: [("one", "000003")], 3: [("two", "000003"), ("two", "000004")]}
    for num_ranks, layouts in LAYOUTS.items():
        jobs = [
            (three_steps, root / name, {"model": models["tied" in name], "change": change})
            for name, change in layouts.items()
        ]
        for saved, kind in moves[num_ranks]:
            arguments = {"model": untied_dir, "checkpoint": root / saved / kind}
            jobs.append((reshard, root / f"{saved}-{kind}-{num_ranks}", arguments))
        for name, last in (("straight", 6), ("first", 3)):
            arguments = {"model": tied_dir, "first": 0, "last": last, "saved": None}
            jobs.append((steps, root / f"{name}{num_ranks}", arguments))
        launched = root / f"launch{num_ranks}"
        finish(launch(num_ranks, launched, *jobs), launched)
    return root


def alone(layout):
    """The layout of one rank to compare with."""
    return "one-tied" if "tied" in layout else "one"


def result(directory, rank=0):
    return json.loads((directory / f"rank{rank}.json").read_text())


@pytest.mark.parametrize("kind", ["policy", "critic"])
@pytest.mark.parametrize("layout", SEVERAL)
def test_more_ranks_train_the_same_weights(runs, layout, kind):
    one = load_file(runs / alone(layout) / kind / "model.safetensors")
    many = load_file(runs / layout / kind / "model.safetensors")
    assert one.keys() == many.keys()
    for name, weight in one.items():
        assert (many[name] - weight).norm() <= 1e-5 * weight.norm(), name


@pytest.mark.parametrize("layout", SEVERAL)
def test_more_ranks_report_the_same_numbers(runs, layout):
    one = result(runs / alone(layout))
    for rank in range(SEVERAL[layout]):
        many = result(runs / layout, rank)
        for ours, theirs in zip(many["rows"], one["rows"], strict=True):
            assert ours == pytest.approx(theirs, rel=2e-5, abs=1e-7)
        for name in ("logp", "values"):
            for ours, theirs in zip(many[name], one[name], strict=True):
                assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("layout", ["one", *SEVERAL])
def test_published_hash_is_that_of_the_files(runs, layout):
    assert result(runs / layout)["hash"] == policy_hash(runs / layout / "policy")


@pytest.mark.parametrize("move", ["one-000003-2", "two-000003-3", "two-000004-3"])
def test_a_checkpoint_moves_to_another_number_of_ranks(runs, move):
    moved = result(runs / move)
    saved = result(runs / move.split("-")[0])
    assert moved["hash"] == saved["hash"]
    assert moved["step"] == 4


def test_a_checkpoint_of_two_ranks_moves_to_one(runs, tmp_path, untied_dir):
    moved = tmp_path / "moved"
    arguments = {"model": untied_dir, "checkpoint": runs / "two" / "000003"}
    finish(launch(1, tmp_path, (reshard, moved, arguments)), tmp_path)
    assert result(moved)["hash"] == result(runs / "two")["hash"]
    again = result(runs / "two-000003-3")
    assert result(moved)["row"] == pytest.approx(again["row"], rel=2e-5)


@pytest.mark.parametrize("num_ranks", LAYOUTS)
def test_six_steps_are_three_a_checkpoint_and_three_to_the_bit(runs, tmp_path, tied_dir, num_ranks):
    saved = runs / f"first{num_ranks}" / "000003"
    arguments = {"model": tied_dir, "first": 3, "last": 6, "saved": saved}
    finish(launch(num_ranks, tmp_path, (steps, tmp_path / "second", arguments)), tmp_path)
    straight = result(runs / f"straight{num_ranks}")
    second = result(tmp_path / "second")
    assert second["rows"] == straight["rows"][3:]
    assert second["hash"] == straight["hash"]


def test_a_dead_rank_ends_the_other_with_an_error(tmp_path, untied_dir):
    survivor, dead = launch(2, tmp_path, (die, tmp_path, {"model": untied_dir}))
    survivor.join(120)
    dead.join(120)
    assert dead.exitcode == 9
    assert survivor.exitcode == 1
    assert "Error" in (tmp_path / "rank0.log").read_text()
