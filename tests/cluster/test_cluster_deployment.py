"""Through a Prefect server, as a team would: a deployment is run, and one run is cancelled."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from relax.store import Run

pytestmark = [pytest.mark.slurm, pytest.mark.integration, pytest.mark.timeout(300)]

REPOSITORY = Path(__file__).parents[2]
PREFECT = str(Path(sys.executable).with_name("prefect"))
SERVE = "from flows.train import train; train.serve(name='cluster')"


@pytest.fixture(scope="module")
def prefect(lab, tmp_path_factory):
    """Environment of clients of a server with one served deployment, `train/cluster`."""
    home = tmp_path_factory.mktemp("prefect")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}/api"
    environ = {
        **os.environ,
        "PYTHONPATH": str(REPOSITORY),
        "OMP_NUM_THREADS": "1",
        "PREFECT_HOME": str(home),
        "PREFECT_API_URL": url,
        "PREFECT_CLI_PROMPT": "false",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "DO_NOT_TRACK": "1",
        "PREFECT_RUNNER_POLL_FREQUENCY": "1",
    }
    server = start([PREFECT, "server", "start", "--port", str(port)], environ, home / "server.log")
    until = time.monotonic() + 120
    while not answers(f"{url}/health"):
        assert time.monotonic() < until, (home / "server.log").read_text()
        time.sleep(0.2)
    runner = start([sys.executable, "-c", SERVE], environ, home / "runner.log")
    inspect = [PREFECT, "deployment", "inspect", "train/cluster"]
    while subprocess.run(inspect, env=environ, capture_output=True, check=False).returncode:
        assert time.monotonic() < until, (home / "runner.log").read_text()
    yield environ
    for process in (runner, server):
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)


def start(words, environ, log):
    """A process with a group of its own."""
    with log.open("w") as file:
        return subprocess.Popen(
            words, env=environ, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )


def answers(url):
    try:
        with urllib.request.urlopen(url, timeout=2) as answer:
            return answer.status == 200
    except OSError:
        return False


def run_words(settings, run_dir, **more):
    overrides = {
        **settings,
        "run_dir": str(run_dir),
        "executor": "slurm",
        "placement": "job",
        "rollout_allocation": "sample",
        "reward_allocation": "cpu",
        "advantage_allocation": "train",
        "update_allocation": "train",
        "num_rollout": 1,
        **more,
    }
    parameter = f"overrides={json.dumps(overrides)}"
    return [PREFECT, "deployment", "run", "train/cluster", "--param", parameter]


def test_deployment_run_trains_on_the_cluster(prefect, settings, tmp_path):
    words = [*run_words(settings, tmp_path / "run"), "--watch"]
    found = subprocess.run(words, env=prefect, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout + found.stderr
    run = Run.open(tmp_path / "run")
    assert run.num_updates() == 1
    ranks = {v for measure, v, _ in run.committed(0, "update").timing if measure == "ranks"}
    assert ranks == {2.0}


def test_cancelled_flow_run_cancels_its_job(prefect, settings, tmp_path, accounted):
    rewards = settings["custom_rm_path"].rsplit(":", 1)[0]
    Path(rewards).with_name("gate").unlink(missing_ok=True)
    own = {"custom_rm_path": f"{rewards}:gated", "rollout_placement": "inline"}
    words = run_words(settings, tmp_path / "run", **own)
    said = subprocess.run(words, env=prefect, capture_output=True, text=True, check=True).stdout
    (run_id,) = [line.split()[-1] for line in said.splitlines() if "UUID" in line]
    record = tmp_path / "run/jobs/000000-reward-1"
    until = time.monotonic() + 120
    while not (record / "node-0.json").exists():
        assert time.monotonic() < until
        time.sleep(0.1)
    subprocess.run([PREFECT, "flow-run", "cancel", run_id], env=prefect, check=True)
    job_id = json.loads((record / "job.json").read_text())["job_id"]
    assert accounted(job_id, "State").startswith("CANCELLED")
