"""Through a Prefect server, as a team would: a deployment is run, and one run is cancelled."""

import contextlib
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

from prefect_server import PREFECT, in_own_session, prefect_server

from relax.store import Run

pytestmark = [pytest.mark.slurm, pytest.mark.integration, pytest.mark.timeout(600)]

SERVE = "from flows.train import train; train.serve(name='cluster')"


@pytest.fixture(scope="module")
def prefect(lab, tmp_path_factory):
    """Environment of clients of a server with one served deployment, `train/cluster`."""
    home = tmp_path_factory.mktemp("prefect")
    serve, log = [sys.executable, "-c", SERVE], home / "runner.log"
    with (
        prefect_server(home, PREFECT_RUNNER_POLL_FREQUENCY="1") as environ,
        in_own_session(serve, environ, log) as runner,
    ):
        inspect = [PREFECT, "deployment", "inspect", "train/cluster"]
        until = time.monotonic() + 180
        while subprocess.run(inspect, env=environ, capture_output=True, check=False).returncode:
            assert runner.poll() is None and time.monotonic() < until, log.read_text()
        yield environ
        runner.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            runner.wait(15)


def run_words(pipeline, run_dir, **more):
    overrides = {**pipeline, "run_dir": str(run_dir), **more}
    parameter = f"overrides={json.dumps(overrides)}"
    return [PREFECT, "deployment", "run", "train/cluster", "--param", parameter]


def test_deployment_run_trains_on_the_cluster(prefect, pipeline, beside, tmp_path):
    """Two steps of all stages, to the bit those of two ranks that no server drove."""
    words = [*run_words(pipeline, tmp_path / "run"), "--watch"]
    found = subprocess.run(words, env=prefect, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout + found.stderr
    run = Run.open(tmp_path / "run")
    assert run.num_updates() == 2
    ranks = {v for measure, v, _ in run.committed(1, "score").timing if measure == "ranks"}
    assert ranks == {2.0}
    assert run.policy_hash(2) == beside.policy_hash(2) != beside.policy_hash(1)
    sampled = json.loads((run.root / "jobs/000001-rollout-1/job.json").read_text())
    assert sampled["shares"] == [[0, 2], [1, 3]]


def test_cancelled_flow_run_cancels_its_job(prefect, pipeline, tmp_path, accounted):
    rewards = pipeline["custom_rm_path"].rsplit(":", 1)[0]
    Path(rewards).with_name("gate").unlink(missing_ok=True)
    own = {"custom_rm_path": f"{rewards}:gated", "rollout_placement": "inline", "rollout_array": 1}
    words = run_words(pipeline, tmp_path / "run", **own)
    said = subprocess.run(words, env=prefect, capture_output=True, text=True, check=True).stdout
    (run_id,) = [line.split()[-1] for line in said.splitlines() if "UUID" in line]
    record = tmp_path / "run/jobs/000000-reward-1"
    until = time.monotonic() + 300
    while not (record / "node-0.json").exists():
        assert time.monotonic() < until
        time.sleep(0.1)
    subprocess.run([PREFECT, "flow-run", "cancel", run_id], env=prefect, check=True)
    job_id = json.loads((record / "job.json").read_text())["job_id"]
    assert accounted(job_id, "State").startswith("CANCELLED")
