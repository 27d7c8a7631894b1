"""What every flow does around its loop: progress, lease, Ctrl-C, and one line at the end."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from flows.opening import HANDED, checked, opened
from flows.progress import Progress
from flows.tracking import Tracker
from relax.config import Config
from relax.doctor.start import Command
from relax.store import Manifest
from tasks.session import Session

Do = Callable[[Session, int, str], Any]
"""Runs one stage of one step: a Prefect task, or the plain function inside it."""
Around = Callable[[Session], AbstractContextManager]
"""What the caller holds open while the loop runs."""
LAST_STAGE: dict[Command, str] = {"train": "update", "sft": "sft", "evaluate": "evaluate"}
"""The stage that ends a step of each command, for what is shown of its progress."""


def launch(
    config: Config,
    command: Command,
    steps: Callable[[Session, Do], None],
    do: Do,
    around: Around = nullcontext,
) -> None:
    """Run the loop `steps` of a command on the run of `config`; `do` runs one stage."""
    found = HANDED.get() or checked(config, command)
    settings, last_stage = found.config, LAST_STAGE[command]
    progress = Progress(settings.run.num_rollout, last_stage)
    tracker = Tracker(settings.wandb, Path(settings.run.run_dir).absolute(), last_stage)

    def report(root: Path, manifest: Manifest, reused: bool) -> None:
        progress.report(root, manifest, reused)
        tracker.report(root, manifest, reused)

    with (
        opened(found, report) as session,
        tracker,
        session.interruptible(),
        progress,
        around(session),
    ):
        progress.begin(session.run.first_step)
        session.plan = planned(steps, session)
        steps(session, do)
        session.finish()
    progress.summary(session.run.root)


def planned(steps: Callable[[Any, Do], None], session: Any) -> dict[int, list[str]]:
    """The stages of each step in the order in which the flow's own loop asks for them."""
    plan: dict[int, list[str]] = {}
    steps(session, lambda _, step, stage: plan.setdefault(step, []).append(stage))
    return plan
