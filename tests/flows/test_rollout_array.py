"""A rollout as an array of jobs: the bits of one process, also when an element is killed."""

import json
from types import SimpleNamespace

import pytest
from crash_lab import Lab

from relax.store import Run
from slurm import records

pytestmark = pytest.mark.integration
SHARDS = {"rollout_batch_size": 4, "rollout_shard_groups": 1, "num_rollout": 1}
ARRAY = {"placement": "job", "rollout_array": 2}
GENERATE = """
import os, signal
turns = []

async def answer(conversation):
    turns.append(1)
    await conversation.sample()
    if len(turns) > 2:  # the second shard of this process
        try:
            os.close(os.open(FLAG, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return
        os.kill(os.getpid(), signal.SIGKILL)
"""
"""Kills its process in its second shard, unless that was done before."""


@pytest.fixture(scope="module")
def settings(lab: Lab):
    """Of a run whose rollout is in four shards, with the killing function; FLAG holds it back."""
    flag = lab.folder / "element-was-killed"
    path = lab.folder / "generate.py"
    path.write_text(GENERATE.replace("FLAG", repr(str(flag))))
    own = {**SHARDS, "custom_generate_function_path": f"{path}:answer"}
    return SimpleNamespace(flag=flag, own=own)


@pytest.fixture(scope="module")
def inline(lab: Lab, settings):
    """The rollout of the inline run."""
    settings.flag.touch()
    return rolled_out(lab, "one", **settings.own)


def rolled_out(lab: Lab, name: str, **more):
    ended = lab.run(lab.folder / name, **more)
    assert ended.code == 0, ended.output
    return Run.open(lab.folder / name).committed(0, "rollout")


@pytest.mark.parametrize("executor", ["local", "debug"])
def test_an_array_makes_the_bits_of_one_process(lab, settings, inline, executor):
    settings.flag.touch()
    made = rolled_out(lab, executor, **settings.own, **ARRAY, executor=executor)
    assert (made.key, made.content) == (inline.key, inline.content)
    row = records.accounting(lab.folder / executor / "jobs/000000-rollout-1")
    assert row is not None
    assert (row["elements"], row["shares"]) == (2, [[0, 2], [1, 3]])
    assert [p.name for p in (lab.folder / executor / "steps/000000").glob(".*")] == []


def test_a_killed_element_costs_its_shard_and_is_sent_again_alone(lab, settings, inline):
    settings.flag.unlink(missing_ok=True)
    made = rolled_out(lab, "killed-run", **settings.own, **ARRAY)
    assert made.content == inline.content
    jobs = lab.folder / "killed-run" / "jobs"
    first, second = (
        json.loads((jobs / f"000000-rollout-{n}/job.json").read_text()) for n in (1, 2)
    )
    assert first["shares"] == [[0, 2], [1, 3]]
    assert second["shares"] in ([[2]], [[3]])
    assert not (jobs / "000000-rollout-3").exists()
