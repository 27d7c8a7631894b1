"""The flow `evaluate`: the newest policy of a run on held-out prompts."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from prefect import flow
from prefect.client.schemas.objects import State

from flows.engine import cancel_run_jobs, run_in_prefect
from flows.launch import Around, Do, launch
from relax.config import Config
from tasks.session import Session


def steps(session: Session, do: Do) -> None:
    """One evaluation, of the policy that the newest update published."""
    do(session, session.run.num_updates(), "evaluate")


def run(config: Config, do: Do, around: Around = nullcontext) -> None:
    """Evaluate; `do` runs one stage, as a Prefect task or plainly."""
    launch(config, "evaluate", steps, do, around)


@flow(name="evaluate", on_cancellation=[cancel_run_jobs])
def evaluate(config: str = "", overrides: dict[str, Any] | None = None) -> State | None:
    """Evaluate by the TOML file `config`, with `overrides` (setting -> value) on top."""
    return run_in_prefect(run, config, overrides)
