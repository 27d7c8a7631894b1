"""Where a stage runs changes no bit of what it makes, and a job outlives the flow that sent it."""

from __future__ import annotations

import signal
from types import SimpleNamespace

import pytest
from crash_lab import RESPONSES, Lab, committed

pytestmark = pytest.mark.integration
NUM_STEPS = 2
STAGES = ("rollout", "reward", "advantage", "update")


@pytest.fixture(scope="module")
def placed(lab: Lab, tmp_path_factory):
    """Every stage a job; the flow is killed while the first reward runs, and started again."""
    run_dir = lab.folder / "placed"
    gate = tmp_path_factory.mktemp("placed") / "gate"
    settings = {"num_rollout": NUM_STEPS, "placement": "job"}
    flow = lab.start(run_dir, gate, **settings)
    flow.send_signal(signal.SIGKILL)
    flow.wait(timeout=60)  # its job holds the pipe: reading to the end would wait for that
    at_death = committed(run_dir)
    again = lab.start(run_dir, gate, **settings)
    heard = [again.stdout.readline()]
    while "waiting for it" not in heard[-1]:
        assert again.poll() is None, heard
        heard.append(again.stdout.readline())
    gate.touch()
    output, _ = again.communicate(timeout=300)
    assert again.returncode == 0, output
    rewarded = (gate.parent / "calls.log").read_text().split().count("reward")
    return SimpleNamespace(run_dir=run_dir, at_death=at_death, heard=heard[-1], rewarded=rewarded)


def test_jobs_make_the_same_bits_as_one_process(lab, placed):
    inline = lab.folder / "inline"
    ended = lab.run(inline, num_rollout=NUM_STEPS)
    assert ended.code == 0, ended.output
    one, many = lab.inspect(inline), lab.inspect(placed.run_dir)
    names = [f"{step}-{stage}" for step in range(NUM_STEPS) for stage in STAGES]
    assert {n: many[n] for n in names} == {n: one[n] for n in names}
    assert many["policies"] == one["policies"]
    assert many["checkpoints"] == one["checkpoints"]


def test_a_job_that_outlived_its_flow_is_waited_for(placed):
    """Nothing is submitted twice, nothing rewarded twice."""
    assert placed.at_death == {(0, "rollout")}
    assert placed.heard.startswith("000000-reward: its job ")
    folders = sorted(path.name for path in (placed.run_dir / "jobs").iterdir())
    wanted = [f"{step:06d}-{stage}-1" for step in range(NUM_STEPS) for stage in STAGES]
    assert folders == sorted(wanted)
    assert placed.rewarded == NUM_STEPS * RESPONSES
