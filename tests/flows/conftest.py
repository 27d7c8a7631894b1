"""A tiny model, a tiny task, a laboratory of killed runs, a real Prefect server with a worker."""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

from crash_lab import Lab
from documented import with_prefect
from prefect_server import PREFECT, ROOT
from prefect_server import prefect_server as server_in


@pytest.fixture(scope="session")
def tiny_model():
    """The model that the recipes come with; nobody writes there."""
    return ROOT / "recipes/tiny_qwen3"


@pytest.fixture(scope="session")
def max3(tmp_path_factory):
    from relax.data.tasks import write_task

    return write_task("max3", tmp_path_factory.mktemp("max3"), seed=0)


@pytest.fixture(scope="session")
def small_settings(tiny_model, max3):
    """Overrides of a run of two steps that takes a second, less its directory."""
    return {
        "hf_checkpoint": str(tiny_model),
        "prompt_data": str(max3.train),
        "num_rollout": 2,
        "rollout_batch_size": 2,
        "n_samples_per_prompt": 2,
        "rollout_max_response_len": 4,
        "lr": 1e-3,
        "min_free_gib": 0,
    }


@pytest.fixture
def settings(small_settings, tmp_path):
    """Those overrides, with a directory."""
    return {**small_settings, "run_dir": str(tmp_path / "run")}


@pytest.fixture(scope="session")
def prefect_server(tmp_path_factory):
    """Environment of a client of a real server."""
    with server_in(tmp_path_factory.mktemp("prefect"), PREFECT_WORKER_QUERY_SECONDS="1") as made:
        yield made


@pytest.fixture(scope="session")
def prefect_cli(prefect_server):
    """Run a prefect command in the checkout; its output."""

    def run(*words: str, code: int = 0) -> str:
        done = subprocess.run(
            [PREFECT, *words], env=prefect_server, cwd=ROOT, capture_output=True, text=True,
            timeout=600, check=False,
        )  # fmt: skip
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout

    return run


class Worker:
    """A process worker on the pool `relax`; kill it as a crash would."""

    def __init__(self, environment: dict[str, str], log: Path) -> None:
        with log.open("a") as output:
            self.process = subprocess.Popen(
                [PREFECT, *shlex.split(with_prefect()["worker start"])[1:]],
                env=environment, cwd=ROOT, stdout=output, stderr=output, start_new_session=True,
            )  # fmt: skip

    def kill(self) -> None:
        """The worker and every flow run it started, at once."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


@pytest.fixture(scope="session")
def deployment(prefect_cli, prefect_server):
    """The shipped deployments on a process pool, as the README makes them; to start a worker."""
    for line in ("work-pool create", "--no-prompt deploy"):
        prefect_cli(*shlex.split(with_prefect()[line])[1:])
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
def relax(tmp_path):
    """Start `relax COMMAND` with settings as flags: relax("train", settings, environment).

    Its output goes to a file, `process.log`. It leads a process group, as in a terminal.
    """
    started = []

    def start(command: str, settings: dict, environment: dict[str, str], *words: str):
        flags = [w for name, v in settings.items() for w in (f"--{name.replace('_', '-')}", str(v))]
        log = tmp_path / f"relax-{len(started)}.log"
        with log.open("w") as output:
            process = subprocess.Popen(
                [sys.executable, "-c", "import sys; from relax.cli import main; sys.exit(main())",
                 command, *flags, *words],
                env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)} | environment,
                cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        process.log = log
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
