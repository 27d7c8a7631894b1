"""The flow `evaluate`: the newest policy of a run on held-out prompts."""

from __future__ import annotations

from typing import Any

from prefect import flow

from flows.launch import Do, launch
from relax.config import Config
from relax.flags import load_config, require
from tasks.cancel import cancel_jobs
from tasks.prefect_tasks import stage
from tasks.session import Session


def steps(session: Session, do: Do) -> None:
    """One evaluation, of the policy that the newest update published."""
    do(session, session.run.num_updates(), "evaluate")


def run(config: Config, do: Do) -> None:
    """Evaluate; `do` runs one stage, as a Prefect task or plainly."""
    require(config, "eval_prompt_data")
    schedule_steps = config.run.num_rollout * config.optimizer_steps
    launch(config, steps, do, schedule_steps=schedule_steps, last_stage="evaluate")


@flow(name="evaluate", on_cancellation=[cancel_jobs])
def evaluate(config: str = "", overrides: dict[str, Any] | None = None) -> None:
    """Evaluate by the TOML file `config`, with `overrides` (setting -> value) on top."""
    run(load_config(config or None, overrides), stage)
