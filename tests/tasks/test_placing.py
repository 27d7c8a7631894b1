"""Which stages share a job, and what a stage's job asks for."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from flows.launch import planned
from flows.sft import steps as sft_steps
from flows.train import steps as train_steps
from relax.errors import ConfigError
from relax.flags import load_config
from slurm.errors import JobError
from slurm.resources import Resources
from tasks.placing import dealt, gang, order_of, resources_of, site_of

STEP = ["evaluate", "rollout", "reward", "score", "advantage", "update"]
GPU = {"gpu": {"nodes": 2, "gpus_per_node": 8, "minutes": 30}, "cpu": {"cpus_per_task": 4}}


def config(**more):
    return load_config(None, {"placement": "job", "allocations": GPU, **more})


def test_stage_without_an_allocation_has_a_job_of_its_own():
    assert [gang(config(), STEP, stage) for stage in STEP] == [(stage,) for stage in STEP]


def test_neighbours_of_one_allocation_share_a_job_whoever_is_asked_for():
    placed = config(
        rollout_allocation="gpu",
        reward_allocation="cpu",
        advantage_allocation="gpu",
        update_allocation="gpu",
    )
    assert gang(placed, STEP, "rollout") == gang(placed, STEP, "evaluate")
    assert gang(placed, STEP, "rollout") == ("evaluate", "rollout")
    assert gang(placed, STEP, "reward") == ("reward",)
    trained = ("score", "advantage", "update")
    assert [gang(placed, STEP, stage) for stage in trained] == [trained] * 3


def test_inline_stage_in_between_parts_a_gang():
    placed = config(
        advantage_allocation="gpu", update_allocation="gpu", advantage_placement="inline"
    )
    assert gang(placed, STEP, "update") == ("update",)
    assert gang(placed, STEP, "score") == ("score",)


def test_a_round_of_dynamic_sampling_shares_a_job_with_its_own_reward_alone():
    placed = config(rollout_allocation="gpu", reward_allocation="gpu")
    step = ["rollout.1", "reward.1", "rollout", "reward"]
    assert [gang(placed, step, stage) for stage in step] == [
        ("rollout.1", "reward.1"),
        ("rollout.1", "reward.1"),
        ("rollout", "reward"),
        ("rollout", "reward"),
    ]
    for later in ("rollout.2", "reward.2"):  # in no plan before its turn comes
        assert gang(placed, step, later) == ("rollout.2", "reward.2")
    apart = config(rollout_allocation="gpu", reward_allocation="cpu")
    assert gang(apart, step, "reward.2") == ("reward.2",)


def test_stage_that_no_plan_knows_is_alone():
    assert gang(config(update_allocation="gpu"), [], "update") == ("update",)


def test_an_array_is_no_part_of_a_gang():
    placed = config(rollout_allocation="gpu", rollout_array=2, rollout_batch_size=64)
    assert gang(placed, STEP, "rollout") == ("rollout",)
    assert gang(placed, STEP, "evaluate") == ("evaluate",)


def test_elements_of_an_array_keep_their_shards_and_those_without_any_are_left_out():
    placed = config(rollout_array=3, rollout_batch_size=100, rollout_shard_groups=16)
    assert dealt(placed, "rollout") == [[0, 3, 6], [1, 4], [2, 5]]
    assert dealt(placed, "rollout", {1, 4, 3, 2}) == [[0, 6], [5]]
    assert dealt(placed, "rollout", set(range(7))) == []
    assert dealt(placed, "reward") == dealt(placed, "evaluate") == []
    assert dealt(config(rollout_array=3, rollout_batch_size=16), "rollout") == []  # one shard


def test_of_dynamic_sampling_the_rounds_are_arrays():
    chosen = {"dynamic_sampling_filter_path": "reward_spread", "over_sampling_batch_size": 48}
    placed = config(rollout_array=9, **chosen)
    assert dealt(placed, "rollout.2") == [[0], [1], [2]]
    assert dealt(placed, "rollout") == []


def test_plan_is_what_the_flows_own_loop_asks_for():
    class Session:
        config = load_config(None, {"num_rollout": 2, "eval_prompt_data": "x", "eval_interval": 1})
        run = SimpleNamespace(first_step=0)  # without dynamic sampling no more is asked of it

    step = ["evaluate", "rollout", "reward", "advantage", "update"]
    assert planned(train_steps, Session()) == {0: step, 1: step, 2: ["evaluate"]}
    assert planned(sft_steps, Session()) == {0: ["sft"], 1: ["sft"]}


def test_resources_are_those_of_the_allocation():
    placed = config(update_allocation="gpu", job_timeout_min=7)
    asked = Resources(nodes=2, gpus_per_node=8, minutes=30)
    assert resources_of(placed, "update") == resources_of(placed, "score") == asked
    assert resources_of(placed, "reward") == Resources(minutes=7)


def test_order_names_run_step_and_first_stage():
    order = order_of(
        config(advantage_allocation="gpu", update_allocation="gpu", executor="slurm"),
        Path("/runs/demo"),
        code=Path("/runs/demo/code/ab"),
        step=12,
        stages=("advantage", "update"),
        attempt="job-2",
    )
    assert order.name == "demo/000012/advantage"
    assert order.labels == {"step": 12, "stages": ["advantage", "update"]}
    assert order.calls == ({"run_dir": "/runs/demo", "step": 12, "names": ["advantage", "update"]},)
    assert (order.executor, order.attempt, order.allocation) == ("slurm", "job-2", "gpu")


def test_interpreter_of_the_run_goes_before_that_of_the_site(tmp_path):
    site = tmp_path / "site.toml"
    site.write_text('python = "site-python"\nhf_home = "/hf"\n')
    assert site_of(config(site=str(site))).python == "site-python"
    own = site_of(config(site=str(site), python="conda run python"))
    assert (own.python, own.hf_home) == ("conda run python", "/hf")
    with pytest.raises(JobError, match="no such file"):
        site_of(config(site=str(tmp_path / "none.toml")))


def test_unknown_allocation_is_a_fault_of_the_settings():
    with pytest.raises(ConfigError, match=r"update_allocation = 'gpus': no such .* has: cpu, gpu"):
        config(update_allocation="gpus")
    with pytest.raises(ConfigError, match="allocations"):
        load_config(None, {"allocations": {"gpu": {"gpu_per_node": 1}}})


def test_allocations_may_be_given_as_json():
    given = load_config(None, {"allocations": '{"a": {"minutes": 5}}', "update_allocation": "a"})
    assert resources_of(given, "update").minutes == 5
