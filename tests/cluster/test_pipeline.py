"""The whole pipeline on the cluster: one node, two nodes, an array, and what is left on disk."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from flows import train
from flows.cli import train as train_command
from flows.launch import launch
from relax.flags import load_config
from relax.stages.rounds import num_rounds
from relax.store import Run
from slurm import records
from slurm.errors import JobError
from tasks.stage import perform

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(300)]

TOGETHER = {
    "placement": "job",
    "rollout_allocation": "all",
    "reward_allocation": "all",
    "advantage_allocation": "all",
    "update_allocation": "all",
}


def trained(settings, run_dir, **more):
    train.run(load_config(None, {**settings, "run_dir": str(run_dir), **more}), perform)
    return Run.open(run_dir)


def contents(run):
    """The hashes of all that a run of two steps committed."""
    stages = ("rollout", "reward", "score", "advantage", "update")
    return {(n, stage): run.committed(n, stage).content for n in range(2) for stage in stages}


def ranks_of(run, step, stage):
    return {v for measure, v, _ in run.committed(step, stage).timing if measure == "ranks"}


def test_two_nodes_give_the_weights_of_two_ranks_elsewhere(
    lab, pipeline, beside, tmp_path, accounted
):
    """Rollout (an array), scores and update on GPUs, reward on CPUs; two ranks of one host."""
    across = trained(pipeline, tmp_path / "across")
    for stage in ("score", "update"):
        assert ranks_of(across, 1, stage) == ranks_of(beside, 1, stage) == {2.0}
    assert across.policy_hash(1) != across.policy_hash(2)
    assert across.policy_hash(2) == beside.policy_hash(2)
    assert contents(across) == contents(beside)

    jobs = sorted(p.name for p in (across.root / "jobs").iterdir())
    made = ("reward", "rollout", "score")
    assert jobs == [f"{n:06d}-{s}-1" for n in range(2) for s in made]
    sampled = records.accounting(across.root / "jobs/000001-rollout-1")
    assert sampled is not None
    assert (sampled["elements"], sampled["shares"]) == (2, [[0, 2], [1, 3]])
    update = once_completed(across.root / "jobs/000001-score-1")
    assert update["stages"] == ["score", "advantage", "update"]
    assert (update["num_nodes"], update["gpus"], len(update["hosts"])) == (2, 2, 2)
    assert update["gpu_s"] == 2 * update["run_s"] > 0
    assert accounted(update["job_id"], "NNodes") == "2"
    reward = once_completed(across.root / "jobs/000001-reward-1")
    assert accounted(reward["job_id"], "Partition") == "cpu"
    per_step = [p for p in (across.root / "steps/000000").rglob("*") if p.is_file()]
    assert len(per_step) <= 15, per_step
    packed = [p.name for p in (across.root / "jobs").glob("000000-*/*") if p.is_file()]
    assert packed == ["job.json"] * 3


def once_completed(folder, seconds=60):
    """A job's row, as soon as its end is recorded: a stage is committed before that."""
    until = time.monotonic() + seconds
    while (row := records.accounting(folder)) is None or row["state"] != "COMPLETED":
        assert time.monotonic() < until, row
        time.sleep(0.05)
    return row


def test_jobs_submitted_ahead_run_once_each_in_their_turn(lab, pipeline, beside, tmp_path, capsys):
    """Each waits in SLURM's queue for the one before it, an array among them."""
    run = trained({**pipeline, "submit_ahead": True, "num_rollout": 1}, tmp_path / "ahead")
    assert run.policy_hash(1) == beside.policy_hash(1)
    names = ("rollout", "reward", "score")
    sampled, rewarded, updated = (
        once_completed(run.root / f"jobs/000000-{name}-1") for name in names
    )
    assert [sampled["after"], rewarded["after"]] == ["", sampled["job_id"]]
    assert updated["after"] == rewarded["job_id"]
    assert sampled["submitted"] < rewarded["submitted"] < sampled["ended"] <= rewarded["started"]
    assert rewarded["ended"] <= updated["started"]
    assert len(list((run.root / "jobs").iterdir())) == 3
    assert "waiting for it" not in capsys.readouterr().err


def test_what_waits_for_a_failed_job_leaves_the_queue(
    lab, pipeline, tmp_path, accounted, monkeypatch
):
    """Also where no flow is left to cancel it."""
    monkeypatch.setattr("tasks.session.Session.cancel_ahead", lambda session: None)
    own = {**pipeline, "submit_ahead": True, "num_rollout": 1}
    (tmp_path / "generate.py").write_text(
        "async def answer(conversation):\n    raise ValueError('of a user')"
    )
    own["custom_generate_function_path"] = f"{tmp_path}/generate.py:answer"
    with pytest.raises(JobError, match="of a user"):
        trained(own, tmp_path / "ahead")
    ahead = records.read(tmp_path / "ahead/jobs/000000-reward-1" / records.JOB)
    assert ahead is not None
    assert accounted(ahead["job_id"], "State").startswith("CANCELLED")


DIES_ONCE = """
import os, signal

async def answer(conversation):
    await conversation.sample()
    if os.environ.get("SLURM_ARRAY_TASK_ID") == "1":
        os.kill(os.getpid(), signal.SIGKILL)
"""
"""Sent again alone, the element is no array any more, and lives."""


def test_a_dead_element_of_an_array_is_sent_again_alone(lab, settings, tmp_path, capsys):
    (tmp_path / "generate.py").write_text(DIES_ONCE)
    own = {
        **settings,
        "rollout_shard_groups": 2,
        "custom_generate_function_path": f"{tmp_path}/generate.py:answer",
    }
    placed = {"placement": "job", "executor": "slurm", "rollout_allocation": "sample"}
    made = rolled_out(own, tmp_path / "array", rollout_array=2, **placed)
    assert "their shards go out again" in capsys.readouterr().err
    assert made.content == rolled_out(own, tmp_path / "inline").content
    asked = [records.read(p / records.JOB) for p in sorted((tmp_path / "array/jobs").iterdir())]
    assert [job and job["shares"] for job in asked] == [[[0, 2], [1, 3]], [[1, 3]]]


def rolled_out(settings, run_dir, **more):
    config = load_config(None, {**settings, "run_dir": str(run_dir), **more})
    steps = lambda session, do: do(session, 0, "rollout")  # noqa: E731
    launch(config, "train", steps, perform)
    return Run.open(run_dir).committed(0, "rollout")


def test_one_job_a_step_gives_the_weights_of_the_inline_run(lab, settings, tmp_path):
    one = {"all": {"partition": "gpu", "gpus_per_node": 1, "minutes": 10}}
    on_slurm = trained(settings, tmp_path / "slurm", executor="slurm", allocations=one, **TOGETHER)
    inline = trained(settings, tmp_path / "inline")
    assert on_slurm.policy_hash(2) == inline.policy_hash(2) != inline.policy_hash(1)
    assert [p.name for p in sorted((on_slurm.root / "jobs").iterdir())] == [
        "000000-rollout-1",
        "000001-rollout-1",
    ]


def test_rounds_of_dynamic_sampling_run_as_jobs(lab, settings, tmp_path):
    """Round after round in jobs of their own, until enough groups differ: as inline, to the bit."""
    own = {
        **settings,
        "num_rollout": 1,
        "n_samples_per_prompt": 2,
        "over_sampling_batch_size": 8,
        "dynamic_sampling_filter_path": "reward_spread",
        "allocations": {"all": {"partition": "gpu", "gpus_per_node": 1, "minutes": 10}},
    }
    on_slurm = trained(own, tmp_path / "slurm", executor="slurm", **TOGETHER)
    inline = trained(own, tmp_path / "inline")
    rounds = num_rounds(inline, 0)
    assert num_rounds(on_slurm, 0) == rounds > 1
    assert on_slurm.policy_hash(1) == inline.policy_hash(1) != inline.policy_hash(0)
    assert [p.name for p in sorted((on_slurm.root / "jobs").iterdir())] == [
        "000000-rollout-1",
        *(f"000000-rollout.{number}-1" for number in range(1, rounds + 1)),
    ]


RECIPE = """
[run]
run_dir = "{run_dir}"
num_rollout = 2
[model]
hf_checkpoint = "{hf_checkpoint}"
[data]
prompt_data = "{prompt_data}"
[placement]
placement = "job"
executor = "slurm"
[slurm]
rollout_allocation = "sample"
reward_allocation = "cpu"
advantage_allocation = "train"
update_allocation = "train"
[slurm.allocations]
"""


@pytest.fixture
def recipe(settings, tmp_path):
    """A cluster recipe as a file."""
    path = tmp_path / "cluster.toml"
    tables = []
    for name, asked in settings["allocations"].items():
        tables += [f"[slurm.allocations.{name}]", *(f"{k} = {v!r}" for k, v in asked.items())]
    path.write_text(RECIPE.format(**settings, run_dir=tmp_path / "run") + "\n".join(tables))
    return path


def test_every_script_of_a_dry_run_is_one_that_sbatch_accepts(lab, recipe, tmp_path, capsys):
    assert train_command([str(recipe), "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert not (tmp_path / "run").exists()
    plan, *scripts = said.split("# --- ")
    assert "job by slurm (allocation train): advantage + update, steps 0 to 1" in plan
    assert len(scripts) == 3
    for script in scripts:
        text = script.split("\n", 1)[1]
        words = ["sbatch", "--test-only"]
        found = subprocess.run(words, input=text, text=True, capture_output=True, check=False)
        assert found.returncode == 0, found.stderr
        assert "--cpus-per-task=1 --kill-on-bad-exit=1" in text.split("srun", 1)[1]


def test_check_runs_a_job_in_each_allocation(lab, recipe):
    """Imports, GPUs, run directory and rendezvous on every rank of three kinds of job."""
    words = f"import sys; from flows.check import check; sys.exit(check({[str(recipe)]!r} + "
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", words + "['--cluster', '--run']))"]
    found = subprocess.run(command, text=True, capture_output=True, check=False, env=environ)
    assert found.returncode == 0, found.stdout + found.stderr
    for test in ("imports", "GPUs", "run directory", "rendezvous"):
        assert found.stdout.count(f": {test} fine") == 4
    assert re.search(r"\b1 ranks came to n[1-3]\b", found.stdout)
    assert "the largest that fits partition cpu: 1 nodes" in found.stdout


def test_check_says_what_does_not_fit(lab, recipe, settings, capsys):
    from flows.check import check

    asked = {
        "train": {"partition": "gpu", "nodes": 9, "gpus_per_node": 4, "minutes": 6000},
        "sample": {"partition": "gqu"},
        "cpu": {"partition": "cpu"},
    }
    assert check([str(recipe), "--cluster", "--allocations", json.dumps(asked)]) == 1
    said = capsys.readouterr().out
    assert "nodes = 9: partition gpu has 3" in said
    assert "gpus_per_node = 4: partition gpu has 2" in said
    assert "minutes = 6000: partition gpu has 600" in said
    assert "partition = 'gqu': no such partition; there are: cpu, gpu, low" in said
