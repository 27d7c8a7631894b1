"""Several gloo ranks against one, on disk and in the numbers."""

import json
import time

import pytest
from rank_jobs import finish, launch
from safetensors.torch import load_file

from relax.trainer.publish import policy_hash

pytestmark = pytest.mark.integration

# Name -> ranks and what differs from one rank with the default cuts.
LAYOUTS = {
    "one": (1, {}),
    "two": (2, {"max_tokens_per_gpu": 40, "recompute_every": 1}),
    "replicas": (2, {"replicate": 2, "micro_batch_size": 3}),
    "three": (3, {"offload": "cpu", "recompute_every": 2}),
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory, untied_dir):
    root = tmp_path_factory.mktemp("ranks")
    for name, (num_ranks, change) in LAYOUTS.items():
        finish(launch("three_steps", num_ranks, root / name, model=str(untied_dir), change=change))
    return root


def result(directory, rank=0):
    return json.loads((directory / f"rank{rank}.json").read_text())


@pytest.mark.parametrize("kind", ["policy", "critic"])
@pytest.mark.parametrize("layout", ["two", "replicas", "three"])
def test_more_ranks_train_the_same_weights(trained, layout, kind):
    one = load_file(trained / "one" / kind / "model.safetensors")
    many = load_file(trained / layout / kind / "model.safetensors")
    assert one.keys() == many.keys()
    for name, weight in one.items():
        assert (many[name] - weight).norm() <= 1e-5 * weight.norm(), name


@pytest.mark.parametrize("layout", ["two", "replicas", "three"])
def test_more_ranks_report_the_same_numbers(trained, layout):
    one = result(trained / "one")
    for rank in range(LAYOUTS[layout][0]):
        many = result(trained / layout, rank)
        for ours, theirs in zip(many["rows"], one["rows"], strict=True):
            assert ours == pytest.approx(theirs, rel=2e-5, abs=1e-7)
        for name in ("logp", "values"):
            for ours, theirs in zip(many[name], one[name], strict=True):
                assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_published_hash_is_that_of_the_files(trained, layout):
    assert result(trained / layout)["hash"] == policy_hash(trained / layout / "policy")


@pytest.mark.parametrize(("saved", "num_ranks"), [("two", 1), ("one", 2), ("two", 3)])
def test_a_checkpoint_moves_to_another_number_of_ranks(
    trained, tmp_path, untied_dir, saved, num_ranks
):
    for kind in ("000003", "000004"):
        checkpoint = str(trained / saved / kind)
        where = tmp_path / kind
        finish(launch("reshard", num_ranks, where, model=str(untied_dir), checkpoint=checkpoint))
        assert result(where)["step"] == 3
        assert result(where)["hash"] == result(trained / saved)["hash"]
        if saved == "one":
            break


def test_a_dead_rank_ends_the_other_with_an_error(tmp_path, untied_dir):
    start = time.monotonic()
    survivor, dead = launch("die", 2, tmp_path, model=str(untied_dir))
    output = survivor.communicate(timeout=60)[0]
    dead.communicate(timeout=60)
    assert dead.returncode == 9
    assert survivor.returncode not in (0, None)
    assert "Error" in output
    assert time.monotonic() - start < 45


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_six_steps_are_three_a_checkpoint_and_three_to_the_bit(tmp_path, tied_dir, num_ranks):
    def run(name, first, last, saved=""):
        arguments = {"model": str(tied_dir), "first": first, "last": last, "saved": saved}
        outputs = finish(launch("steps", num_ranks, tmp_path / name, **arguments))
        return outputs[0].splitlines()

    straight = run("straight", 0, 6)
    run("first", 0, 3)
    second = run("second", 3, 6, str(tmp_path / "first" / "000003"))
    assert [line for line in second if line.strip()][-4:] == straight[-4:]
