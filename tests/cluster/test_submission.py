"""Single jobs on a real SLURM: refusals, arrays, dying ranks, an outer job's environment."""

import dataclasses
import json
import subprocess
import time

import pytest

from slurm import records
from slurm.errors import JobError
from slurm.outcome import Failed
from slurm.resources import Resources
from slurm.submit import Order, submit
from slurm.watch import Watch

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(300)]

TARGETS = """
import json, os, subprocess, sys, time
from pathlib import Path

def note(place, directory, attempt, stop):
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "SLURM_JOB_PARTITION", "CUDA_VISIBLE_DEVICES")
    told = {name: os.environ.get(name) for name in names}
    part = Path(directory, f"part-{place}-{told['RANK']}")
    part.write_text(json.dumps(told))
    part.rename(part.with_name(part.name.replace("part", "note")))

def one_rank_dies(attempt, stop):
    if os.environ["RANK"] == "1":
        os._exit(3)
    time.sleep(300)

def leaves_work(directory, attempt, stop):
    if (Path(directory) / "first").exists():
        return True
    (Path(directory) / "first").touch()
    child = subprocess.Popen(["sleep", "300"])
    while not stop():
        time.sleep(0.05)
    time.sleep(0.5)  # SLURM signals every process of the job
    Path(directory, "child").write_text(str(child.poll()))
    return False
"""


@pytest.fixture
def order(lab, tmp_path):
    """Orders whose target stands in a file of this test, and the folder they run in."""
    code = tmp_path / "code"
    code.mkdir()
    (code / "targets_on_node.py").write_text(TARGETS)
    (code / "slurm").symlink_to(records.__file__.rsplit("/", 1)[0])
    folder = tmp_path / "folder"

    def make(function, *calls, **asked):
        records.claim(folder, {})
        return folder, Order(
            executor="slurm",
            name=f"test/{function}",
            target=f"targets_on_node:{function}",
            calls=calls,
            attempt="job-1",
            resources=Resources(**{"partition": "gpu", "mem_gb": 1, **asked}),
            allocation="train",
            code=code,
        )

    return make


def ended(folder, number=1, seconds=150):
    until = time.monotonic() + seconds
    while True:
        found = [n for n in records.node_records(folder) if "ended" in n]
        if len(found) == number:
            return found
        assert time.monotonic() < until, records.node_records(folder)
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"partition": "gpus"}, "invalid partition specified: gpus .*change partition of"),
        ({"minutes": 6000}, "time limit.*change minutes of"),
        ({"gpus_per_node": 9}, "node configuration is not available; change gpus_per_node"),
        ({"nodes": 4}, "[Nn]ode.*; change .*node"),
    ],
)
def test_refusal_gives_the_clusters_words_and_what_to_change(order, asked, words, capfd):
    folder, bad = order("note", {}, **asked)
    with pytest.raises(JobError, match=rf"(?s)sbatch refused: .*{words}.*slurm.allocations.train"):
        submit(folder, bad)
    assert capfd.readouterr().err == ""


def test_array_runs_each_element_and_counts_as_one_job(order, tmp_path):
    calls = [{"place": place, "directory": str(tmp_path)} for place in range(3)]
    folder, shards = order("note", *calls, gpus_per_node=1)
    job = submit(folder, shards)
    ended(folder, 3)
    assert sorted(p.name for p in tmp_path.glob("note-*")) == ["note-0-0", "note-1-0", "note-2-0"]
    row = records.accounting(folder)
    assert row is not None
    assert (row["job_id"], row["elements"], row["restarts"]) == (job.job_id, 3, 0)
    assert row["state"] == "COMPLETED"


def test_dying_rank_takes_its_job_down(order):
    folder, gang = order("one_rank_dies", {}, nodes=2)
    job, watch, start = submit(folder, gang), Watch(), time.monotonic()
    while not isinstance(outcome := job.outcome(watch, lambda: False), Failed):
        assert time.monotonic() - start < 60
        time.sleep(0.1)
    assert outcome.state == "FAILED"
    assert "task 1: Exited with exit code 3" in str(job.gave_up(outcome, "test"))


def test_job_asked_to_stop_goes_back_into_the_queue(order, tmp_path):
    """Its ranks are told, and what they started (engines, sandboxes) lives on until they end."""
    folder, work = order("leaves_work", {"directory": str(tmp_path)}, minutes=60)
    job = submit(folder, work)
    call = {"place": 0, "directory": str(tmp_path)}
    behind = dataclasses.replace(order("note", call)[1], after=job.job_id)
    records.claim(tmp_path / "behind", {})
    submit(tmp_path / "behind", behind)
    while not (tmp_path / "first").exists():
        time.sleep(0.05)
    subprocess.run(["scancel", "--signal=USR2", job.job_id], check=True)
    first, second = ended(folder, 2)
    assert [first["state"], second["state"]] == ["STOPPED", "COMPLETED"]
    assert (tmp_path / "child").read_text() == "None"
    (waited,) = ended(tmp_path / "behind")  # for the second end, not for the first
    assert waited["started"] >= second["ended"]
    row = records.accounting(folder)
    assert row is not None
    assert (row["restarts"], row["state"]) == (1, "COMPLETED")


def test_environment_of_an_outer_job_does_not_reach_the_inner_one(order, tmp_path, monkeypatch):
    outer = {
        "SBATCH_PARTITION": "cpu",
        "SLURM_JOB_ID": "7",
        "SLURM_NTASKS": "9",
        "SLURM_NNODES": "3",
        "RANK": "5",
        "WORLD_SIZE": "9",
    }
    for name, value in outer.items():
        monkeypatch.setenv(name, value)
    call = {"place": 0, "directory": str(tmp_path)}
    folder, gang = order("note", call, nodes=2, gpus_per_node=2)
    submit(folder, gang)
    ended(folder)
    until = time.monotonic() + 60
    while len(list(tmp_path.glob("note-*"))) < 2:
        assert time.monotonic() < until
        time.sleep(0.05)
    told = [json.loads((tmp_path / f"note-0-{rank}").read_text()) for rank in range(2)]
    first = told[0]["MASTER_ADDR"]
    assert first in ("n1", "n2")  # of three nodes, the first of two
    for rank, one in enumerate(told):
        assert one == {
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "MASTER_ADDR": first,
            "SLURM_JOB_PARTITION": "gpu",
            "CUDA_VISIBLE_DEVICES": "0,1",
        }
