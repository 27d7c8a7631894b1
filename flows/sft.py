"""The flow `sft`: supervised steps on prompts and labels, before reinforcement."""

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
    """The whole run; a stage that is committed already returns at once."""
    for step in range(session.run.first_step, session.config.run.num_rollout):
        do(session, step, "sft")


def run(config: Config, do: Do, around: Around = nullcontext) -> None:
    """Train on labels; `do` runs one stage, as a Prefect task or plainly."""
    launch(config, "sft", steps, do, around)


@flow(name="sft", on_cancellation=[cancel_run_jobs])
def sft(config: str = "", overrides: dict[str, Any] | None = None) -> State | None:
    """Train by the TOML file `config`, with `overrides` (setting -> value) on top."""
    return run_in_prefect(run, config, overrides)
