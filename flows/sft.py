"""The flow `sft`: supervised steps on prompts and labels, before reinforcement."""

from __future__ import annotations

from typing import Any

from prefect import flow

from flows.launch import Do, launch
from relax.config import Config
from relax.flags import load_config
from tasks.cancel import cancel_jobs
from tasks.prefect_tasks import stage
from tasks.session import Session


def steps(session: Session, do: Do) -> None:
    """The whole run; a stage that is committed already returns at once."""
    for step in range(session.config.run.num_rollout):
        do(session, step, "sft")


def run(config: Config, do: Do) -> None:
    """Train on labels; `do` runs one stage, as a Prefect task or plainly."""
    schedule_steps = config.run.num_rollout * config.sft.sft_steps
    launch(config, steps, do, schedule_steps=schedule_steps, last_stage="sft")


@flow(name="sft", on_cancellation=[cancel_jobs])
def sft(config: str = "", overrides: dict[str, Any] | None = None) -> None:
    """Train by the TOML file `config`, with `overrides` (setting -> value) on top."""
    run(load_config(config or None, overrides), stage)
