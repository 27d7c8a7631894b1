"""What every flow does around its loop: progress, lease, Ctrl-C, and one line at the end."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from flows.opening import opened
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
COMMANDS: dict[str, Command] = {"sft": "sft", "evaluate": "evaluate"}
"""The command by the stage that ends its steps; any other is `train`."""


def launch(
    config: Config,
    steps: Callable[[Session, Do], None],
    do: Do,
    *,
    schedule_steps: int,
    last_stage: str,
    around: Around = nullcontext,
) -> None:
    """Run `steps` on the run of `config`. `last_stage` ends a step, for the progress display."""
    command = COMMANDS.get(last_stage, "train")
    progress = Progress(config.run.num_rollout, last_stage)
    tracker = Tracker(config.wandb, Path(config.run.run_dir).absolute(), last_stage)

    def report(root: Path, manifest: Manifest, reused: bool) -> None:
        progress.report(root, manifest, reused)
        tracker.report(root, manifest, reused)

    with (
        opened(config, command, schedule_steps=schedule_steps, report=report) as session,
        tracker,
        session.interruptible(),
        progress,
        around(session),
    ):
        session.plan = planned(steps, session)
        steps(session, do)
        session.finish()
    progress.summary(session.run.root)


def planned(steps: Callable[[Any, Do], None], session: Any) -> dict[int, list[str]]:
    """The stages of each step in the order in which the flow's own loop asks for them."""
    plan: dict[int, list[str]] = {}
    steps(session, lambda _, step, stage: plan.setdefault(step, []).append(stage))
    return plan
