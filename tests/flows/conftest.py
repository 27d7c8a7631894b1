"""A tiny model, a tiny task, a laboratory of killed runs, a real Prefect server with a worker."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from crash_lab import Lab

ROOT = Path(__file__).resolve().parents[2]
PREFECT = str(Path(sys.executable).parent / "prefect")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    from relax.data.tasks import build_model

    return build_model(
        tmp_path_factory.mktemp("tiny") / "model", hidden_size=32, num_layers=1, num_heads=1,
        num_kv_heads=1, head_dim=32, intermediate_size=64, seed=0,
    )  # fmt: skip


@pytest.fixture(scope="session")
def max3(tmp_path_factory):
    from relax.data.tasks import write_task

    return write_task("max3", tmp_path_factory.mktemp("max3"), seed=0)


@pytest.fixture
def settings(tiny_model, max3, tmp_path):
    """Overrides of a run of two steps that takes a second."""
    return {
        "run_dir": str(tmp_path / "run"),
        "hf_checkpoint": str(tiny_model),
        "prompt_data": str(max3.train),
        "num_rollout": 2,
        "rollout_batch_size": 2,
        "n_samples_per_prompt": 2,
        "rollout_max_response_len": 4,
        "lr": 1e-3,
        "min_free_gib": 0,
    }


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="session")
def prefect_server(tmp_path_factory):
    """Environment of a client of a real server on a free port, its own home and database."""
    home, port = tmp_path_factory.mktemp("prefect"), free_port()
    environment = os.environ | {
        "PREFECT_HOME": str(home),
        "PREFECT_API_URL": f"http://127.0.0.1:{port}/api",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_LOGGING_LEVEL": "INFO",
        "PREFECT_CLI_PROMPT": "false",
        "PREFECT_WORKER_QUERY_SECONDS": "1",
        "DO_NOT_TRACK": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
    }
    with (home / "server.log").open("w") as log:
        server = subprocess.Popen(
            [PREFECT, "server", "start", "--port", str(port)],
            env=environment, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
    try:
        wait_until_up(f"http://127.0.0.1:{port}/api/health", server)
        yield environment
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def wait_until_up(url: str, server: subprocess.Popen) -> None:
    for _ in range(480):
        assert server.poll() is None, "the Prefect server ended"
        try:
            with urllib.request.urlopen(url, timeout=2):
                return
        except OSError:
            time.sleep(0.25)
    raise AssertionError(f"{url}: no answer in two minutes")


@pytest.fixture(scope="session")
def prefect_cli(prefect_server):
    """Run a prefect command in the checkout; its output."""

    def run(*words: str, code: int = 0) -> str:
        done = subprocess.run(
            [PREFECT, *words], env=prefect_server, cwd=ROOT, capture_output=True, text=True,
            timeout=300, check=False,
        )  # fmt: skip
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout

    return run


class Worker:
    """A process worker on the pool `relax`; kill it as a crash would."""

    def __init__(self, environment: dict[str, str], log: Path) -> None:
        with log.open("a") as output:
            self.process = subprocess.Popen(
                [PREFECT, "worker", "start", "--pool", "relax"],
                env=environment, cwd=ROOT, stdout=output, stderr=output, start_new_session=True,
            )  # fmt: skip

    def kill(self) -> None:
        """The worker and every flow run it started, at once."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


@pytest.fixture(scope="session")
def deployment(prefect_cli, prefect_server):
    """The shipped deployments on a process pool, and a function that starts a worker."""
    prefect_cli("work-pool", "create", "relax", "--type", "process")
    prefect_cli("--no-prompt", "deploy", "--all")
    workers = []

    def start_worker() -> Worker:
        workers.append(Worker(prefect_server, Path(prefect_server["PREFECT_HOME"]) / "worker.log"))
        return workers[-1]

    yield start_worker
    for worker in workers:
        worker.kill()


@pytest.fixture(scope="session")
def deployment_run(prefect_cli):
    """Start the deployment train/demo with settings: run(settings, "--watch")."""

    def run(settings: dict, *words: str, code: int = 0) -> str:
        given = ["--param", 'config=""', "--param", f"overrides={json.dumps(settings)}"]
        return prefect_cli("deployment", "run", "train/demo", *given, *words, code=code)

    return run


@pytest.fixture
def relax():
    """Start `relax COMMAND` with settings as flags: relax("train", settings, environment)."""
    started = []

    def start(command: str, settings: dict, environment: dict[str, str], *words: str):
        flags = [w for name, v in settings.items() for w in (f"--{name.replace('_', '-')}", str(v))]
        process = subprocess.Popen(
            [sys.executable, "-c", "import sys; from relax.cli import main; sys.exit(main())",
             command, *flags, *words],
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)} | environment,
            cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()


@pytest.fixture(scope="session")
def lab():
    """In memory where the machine has such a place: these runs fsync without end."""
    memory = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(prefix="relax-lab-", dir=memory if memory.is_dir() else None))
    laboratory = Lab(folder)
    yield laboratory
    laboratory.close()
    shutil.rmtree(folder)
