"""The cluster of the session, and small runs to put on it."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
REWARD = """
import time
from pathlib import Path

def parity(response_text: str, label: str) -> float:
    "Some reward that a random model earns half of the time."
    return float(sum(map(ord, response_text)) % 2)

def gated(response_text: str, label: str) -> float:
    "As parity, once the test lets it."
    while not Path(GATE).exists():
        time.sleep(0.02)
    return parity(response_text, label)

def failing(response_text: str, label: str) -> float:
    raise RuntimeError("no reward for " + label)
"""
FLOW = """
import json, sys
from flows.launch import launch
from relax.flags import load_config
from tasks.stage import perform

def steps(session, do):
    for stage in ("rollout", "reward"):
        do(session, 0, stage)

config = load_config(None, json.loads(sys.argv[1]))
try:
    launch(config, "train", steps, perform)
except (ValueError, KeyboardInterrupt) as error:
    sys.exit(f"{type(error).__name__}: {error}")
"""
"""A flow without Prefect and torch: the rollout is there already, the reward is a job."""


def _lab():
    spec = importlib.util.spec_from_file_location("lab", Path(__file__).with_name("lab.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def lab():
    """The running cluster; skipped where none can be had, except in CI."""
    lab = _lab()
    reason = lab.missing()
    if reason and os.environ.get("CI") == "true":
        pytest.fail(f"CI must run the cluster's tests: {reason}")
    if reason:
        pytest.skip(f"no SLURM cluster here: {reason}")
    lab.install()
    lab.start()
    os.environ.update(lab.environment())
    yield lab
    lab.stop()
    for name in lab.environment():
        del os.environ[name]


ALLOCATIONS = {
    "train": {"partition": "gpu", "nodes": 2, "gpus_per_node": 1, "mem_gb": 1, "minutes": 10},
    "sample": {"partition": "gpu", "gpus_per_node": 1, "mem_gb": 1, "minutes": 10},
    "cpu": {"partition": "cpu", "mem_gb": 1, "minutes": 10},
}


@pytest.fixture(scope="session")
def settings(tmp_path_factory):
    """Overrides of a tiny run by name, shared by all tests: 2 steps, hidden size 32."""
    from relax.data.tasks import build_model, build_tokenizer, write_task

    root = tmp_path_factory.mktemp("task")
    write_task("max3", root, seed=1)
    build_tokenizer(root / "base")
    build_model(root / "base", seed=1, hidden_size=32)
    (root / "rewards.py").write_text(REWARD.replace("GATE", repr(str(root / "gate"))))
    return {
        "hf_checkpoint": str(root / "base"),
        "prompt_data": str(root / "train.jsonl"),
        "custom_rm_path": f"{root}/rewards.py:parity",
        "num_rollout": 2,
        "rollout_batch_size": 8,
        "n_samples_per_prompt": 4,
        "rollout_max_response_len": 4,
        "lr": 1e-3,
        "allocations": ALLOCATIONS,
        "min_free_gib": 0,
    }


@pytest.fixture(scope="session")
def pipeline(settings):
    """A run with every stage: rollout (an array), reward on CPUs, the rest on two nodes."""
    return {
        **settings,
        "num_steps_per_rollout": 2,  # so that scores are needed
        "rollout_shard_groups": 2,
        "rollout_array": 2,
        "placement": "job",
        "executor": "slurm",
        "rollout_allocation": "sample",
        "reward_allocation": "cpu",
        "advantage_allocation": "train",
        "update_allocation": "train",
    }


@pytest.fixture(scope="session")
def beside(pipeline, tmp_path_factory):
    """The run of `pipeline` by two ranks of this machine, without SLURM and without an array."""
    from flows import train
    from relax.flags import load_config
    from relax.store import Run
    from tasks.stage import perform

    run_dir = tmp_path_factory.mktemp("beside") / "run"
    names = ("rollout", "reward", "advantage", "update")
    own = {
        **pipeline,
        **{f"{name}_allocation": "all" for name in names},
        "allocations": {"all": {"tasks_per_node": 2}},
        "executor": "local",
        "rollout_placement": "inline",
        "rollout_array": 1,
        "run_dir": str(run_dir),
    }
    train.run(load_config(None, own), perform)
    return Run.open(run_dir)


@pytest.fixture(scope="session")
def rolled_out(tmp_path_factory, settings):
    """A run whose first rollout is committed: {reward function: directory}, made when asked."""
    from flows.launch import launch
    from relax.flags import load_config
    from tasks.stage import perform

    made = {}

    def make(function):
        if function not in made:
            run_dir = tmp_path_factory.mktemp(function) / "run"
            path = settings["custom_rm_path"].rsplit(":", 1)[0]
            own = {**settings, "custom_rm_path": f"{path}:{function}", "run_dir": str(run_dir)}
            steps = lambda session, do: do(session, 0, "rollout")  # noqa: E731
            launch(load_config(None, own), "train", steps, perform)
            made[function] = own
        return made[function]

    return make


class Flows:
    """Flow processes on one run of their own, whose reward is a job on the CPU partition."""

    def __init__(self, run_dir, overrides, log_dir, gate):
        self.run_dir, self.overrides, self.log_dir, self.gate = run_dir, overrides, log_dir, gate
        self.started = []

    def start(self, **more):
        """Start a flow; its output goes to a file."""
        given = json.dumps({**self.overrides, **more})
        log = (self.log_dir / f"flow-{len(self.started)}.log").open("w+")
        process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(FLOW), given],
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"},
        )
        process.log = log
        self.started.append(process)
        return process

    def said(self, process):
        process.log.seek(0)
        return process.log.read()

    def finished(self, process, seconds=90):
        process.wait(seconds)
        assert process.returncode == 0, self.said(process)

    @property
    def attempts(self):
        return sorted(p.name for p in (self.run_dir / "jobs").glob("000000-reward-[0-9]*"))

    def record(self, name):
        path = self.run_dir / "jobs" / "000000-reward-1" / name
        return json.loads(path.read_text()) if path.exists() else None

    def wait_for(self, what, ready, seconds=60):
        until = time.monotonic() + seconds
        while not ready():
            said = [self.said(p) for p in self.started]
            assert time.monotonic() < until, f"{what}: {said}"
            time.sleep(0.02)

    def open_gate(self):
        self.gate.touch()

    @property
    def committed(self):
        return (self.run_dir / "steps/000000/reward/manifest.json").exists()


@pytest.fixture
def flows_on(lab, rolled_out, tmp_path):
    """Flows on a copy of the rolled-out run with a reward function."""
    made = []

    def make(function, **more):
        own = rolled_out(function)
        run_dir = tmp_path / "run"
        shutil.copytree(own["run_dir"], run_dir)
        gate = Path(own["custom_rm_path"].rsplit("/", 1)[0]) / "gate"
        gate.unlink(missing_ok=True)
        placed = {
            "run_dir": str(run_dir),
            "reward_placement": "job",
            "executor": "slurm",
            "reward_allocation": "cpu",
        }
        flows = Flows(run_dir, {**own, **placed, **more}, tmp_path, gate)
        made.append(flows)
        return flows

    yield make
    for flows in made:
        for process in flows.started:
            process.kill()
            process.wait()
            process.log.close()
        subprocess.run(["scancel", "-u", "root"], check=False)


def sacct(job_id, field):
    """One field of a job in the accounting, as soon as it is final there."""
    until = time.monotonic() + 90  # a Prefect server takes its time to cancel, too
    while True:
        words = ["sacct", "-n", "-P", "-X", "-j", str(job_id), "-o", f"State,{field}"]
        found = subprocess.run(words, capture_output=True, text=True, check=True).stdout.split("|")
        if len(found) == 2 and found[0] not in ("PENDING", "RUNNING"):
            return found[1].strip()
        assert time.monotonic() < until, found
        time.sleep(0.1)


@pytest.fixture
def accounted(lab):
    """sacct(job id, field)."""
    return sacct
