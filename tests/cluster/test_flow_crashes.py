"""Flows that die, race, are stopped or refused, on a real SLURM."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest

from relax.flags import load_config
from relax.store import Run

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(300)]


def jobs_named(name):
    """Ids of all jobs that SLURM ever had under a name since it started."""
    words = ["squeue", "-h", "-t", "all", "-n", name, "-o", "%i"]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout.split()


def unique(flows):
    """Give the run a name of its own, which its jobs' names begin with."""
    own = flows.run_dir.with_name(f"{flows.run_dir.parent.name}"[:40])
    flows.run_dir.rename(own)
    flows.run_dir = own
    flows.overrides["run_dir"] = str(own)
    return f"{own.name}/000000/reward"


def found_again(flows, flow):
    """Wait until a later flow says that it found the job of an earlier one."""
    said = f"its job {flows.record('job.json')['job_id']} is"
    flows.wait_for("the second flow's look", lambda: said in flows.said(flow))


def test_flow_killed_while_its_job_is_pending(flows_on):
    allocations = {"cpu": {"partition": "cpu", "minutes": 10, "extra": {"begin": "now+1hour"}}}
    flows = flows_on("parity", allocations=allocations)
    name = unique(flows)
    first = flows.start()
    flows.wait_for("submission", lambda: flows.record("job.json"))
    first.kill()
    first.wait()
    job_id = flows.record("job.json")["job_id"]
    second = flows.start()
    found_again(flows, second)
    assert flows.record("node-0.json") is None
    subprocess.run(["scontrol", "update", f"jobid={job_id}", "starttime=now"], check=True)
    flows.finished(second)
    assert flows.attempts == ["000000-reward-1"]
    assert jobs_named(name) == [job_id]


def test_flow_killed_while_its_job_is_running(flows_on):
    flows = flows_on("gated")
    name = unique(flows)
    first = flows.start()
    flows.wait_for("the job's start", lambda: flows.record("node-0.json"))
    first.kill()
    first.wait()
    second = flows.start()
    found_again(flows, second)
    flows.open_gate()
    flows.finished(second)
    assert flows.attempts == ["000000-reward-1"]
    assert jobs_named(name) == [flows.record("job.json")["job_id"]]


def test_flow_killed_and_its_job_finished_meanwhile(flows_on):
    flows = flows_on("gated")
    name = unique(flows)
    first = flows.start()
    flows.wait_for("the job's start", lambda: flows.record("node-0.json"))
    first.kill()
    first.wait()
    flows.open_gate()
    flows.wait_for("the job's commit", lambda: flows.committed)
    second = flows.start()
    flows.finished(second)
    assert "nothing computed (2 stages)" in flows.said(second).replace("\n", " ")
    assert flows.attempts == ["000000-reward-1"]
    assert len(jobs_named(name)) == 1


def test_two_flows_raced_submit_one_job(flows_on):
    flows = flows_on("gated")
    name = unique(flows)
    racers = [flows.start(), flows.start()]
    flows.wait_for("one to leave", lambda: any(p.poll() is not None for p in racers))
    loser, winner = sorted(racers, key=lambda p: p.poll() is None)
    assert "in use by process" in flows.said(loser)
    flows.wait_for("the job's start", lambda: flows.record("node-0.json"))
    flows.open_gate()
    flows.finished(winner)
    assert flows.attempts == ["000000-reward-1"]
    assert len(jobs_named(name)) == 1


RACE_WITHOUT_LEASE = """
import json, sys, time
from types import SimpleNamespace
from pathlib import Path
from relax.flags import load_config
from relax.store import Run
from tasks.session import Session
from tasks.stage import perform

config = load_config(None, json.loads(sys.argv[1]))
run = Run.open(config.run.run_dir)
lease = SimpleNamespace(check=lambda: None)
session = Session(config, run, lease, lambda *_: None)
time.sleep(max(0.0, float(sys.argv[2]) - time.time()))
print(perform(session, 0, "reward")[0].attempt)
"""


def test_without_the_lease_claims_still_let_one_job_through(flows_on, tmp_path):
    """The lease is a courtesy: two flows that both believe to hold it share one job."""
    flows = flows_on("parity")
    name = unique(flows)
    sources = json.loads((flows.run_dir / "config/0001.json").read_text())["sources"]
    about = {"command": "test", "schedule_steps": 1}
    Run.start(load_config(None, flows.overrides), sources, about)
    words = [json.dumps(flows.overrides), str(time.time() + 4)]
    environ = {**os.environ, "PYTHONPATH": str(os.getcwd())}
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", RACE_WITHOUT_LEASE, *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environ,
        )
        for _ in range(4)
    ]
    said = [p.communicate(timeout=90) for p in racers]
    assert [p.returncode for p in racers] == [0] * 4, said
    assert len({out for out, _ in said}) == 1
    assert flows.attempts == ["000000-reward-1"]
    assert len(jobs_named(name)) == 1


def test_failing_reward_shows_its_traceback_once(flows_on):
    flows = flows_on("failing")
    flow = flows.start()
    flow.wait(90)
    said = flows.said(flow)
    assert flow.returncode == 1
    assert said.count("Traceback") == 1
    assert re.search(r"rewards.py\", line \d+, in failing", said)
    assert said.rstrip().endswith(tuple(f"RuntimeError: no reward for {n}" for n in range(10)))
    assert "job.log" in os.listdir(flows.run_dir / "jobs/000000-reward-1")


def test_stopped_flow_cancels_its_job_and_a_new_one_starts_over(flows_on, accounted):
    flows = flows_on("gated")
    flow = flows.start()
    flows.wait_for("the job's start", lambda: flows.record("node-0.json"))
    flow.send_signal(signal.SIGINT)
    flow.wait(90)
    job_id = flows.record("job.json")["job_id"]
    assert f"job {job_id} cancelled" in flows.said(flow)
    assert accounted(job_id, "State").startswith("CANCELLED")
    flows.open_gate()
    flows.finished(flows.start())
    assert flows.attempts == ["000000-reward-1", "000000-reward-2"]


def test_detached_flow_leaves_its_job(flows_on, accounted):
    flows = flows_on("gated", detach=True)
    flow = flows.start()
    flows.wait_for("the job's start", lambda: flows.record("node-0.json"))
    flow.send_signal(signal.SIGTERM)
    flow.wait(90)
    assert "goes on" in flows.said(flow)
    flows.open_gate()
    flows.wait_for("the job's commit", lambda: flows.committed)
    assert accounted(flows.record("job.json")["job_id"], "ExitCode") == "0:0"


def test_job_of_a_lost_node_is_waited_for_and_runs_again(flows_on):
    flows = flows_on("gated")
    flow = flows.start()
    flows.wait_for("the job's start", lambda: flows.record("node-0.json"))
    update = ["scontrol", "update", "nodename=n4"]
    subprocess.run([*update, "state=down", "reason=test"], check=True)
    # The gate stays shut until then: the first start lives until the kill reaches it.
    flows.wait_for("its second start", lambda: resumed(update) and flows.record("node-1.json"))
    flows.open_gate()
    flows.finished(flow)
    assert flows.attempts == ["000000-reward-1"]
    manifest = json.loads((flows.run_dir / "steps/000000/reward/manifest.json").read_text())
    assert manifest["attempt"].endswith("-1")  # made by the job's second start


def resumed(update):
    """Bring the node back; it may be back already."""
    subprocess.run([*update, "state=resume"], check=False, capture_output=True)
    return True
