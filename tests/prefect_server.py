"""A real Prefect server on a free port, with its own home and database."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PREFECT = str(Path(sys.executable).with_name("prefect"))
SETTINGS = {
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_CLI_PROMPT": "false",
    "DO_NOT_TRACK": "1",
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": str(ROOT),
}
TRIES, PATIENCE_S = 5, 180.0


@contextlib.contextmanager
def prefect_server(home: Path, **settings: str) -> Iterator[dict[str, str]]:
    """The environment of its clients, until the end of the block.

    Another process may take the port between the look and the start: the server then ends, and
    another is started on another port.
    """
    environment = os.environ | SETTINGS | {"PREFECT_HOME": str(home)} | settings
    log = home / "server.log"
    for _ in range(TRIES):
        port = free_port()
        environment["PREFECT_API_URL"] = f"http://127.0.0.1:{port}/api"
        words = [PREFECT, "server", "start", "--port", str(port)]
        with in_own_session(words, environment, log) as server:
            if is_up(f"{environment['PREFECT_API_URL']}/health", server):
                yield environment
                return
    raise AssertionError(f"no Prefect server in {TRIES} tries: {log.read_text()}")


@contextlib.contextmanager
def in_own_session(words: list[str], environment: dict[str, str], log: Path):
    """A process, killed with all that it started at the end of the block."""
    with log.open("a") as output:
        process = subprocess.Popen(
            words, env=environment, cwd=ROOT, stdout=output, stderr=output, start_new_session=True
        )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def free_port() -> int:
    """A port that nobody listens on just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def is_up(url: str, server: subprocess.Popen) -> bool:
    """Whether the server answers; False once it has ended."""
    until = time.monotonic() + PATIENCE_S
    while server.poll() is None:
        assert time.monotonic() < until, f"{url}: no answer in {PATIENCE_S:.0f} s"
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=5):
            return True
        time.sleep(0.25)
    return False
