"""The flow `train`: rollout, reward, advantage, update, once per step."""

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
    config = session.config
    for step in range(config.run.num_rollout):
        if evaluation_due(config, step):
            do(session, step, "evaluate")
        do(session, step, "rollout")
        do(session, step, "reward")
        do(session, step, "advantage")
        do(session, step, "update")
    if config.evaluate.eval_prompt_data:
        do(session, config.run.num_rollout, "evaluate")


def evaluation_due(config: Config, step: int) -> bool:
    """Before the first step, and every eval_interval steps."""
    if not config.evaluate.eval_prompt_data:
        return False
    interval = config.evaluate.eval_interval
    return step == 0 or (interval > 0 and step % interval == 0)


def run(config: Config, do: Do) -> None:
    """Train; `do` runs one stage, as a Prefect task or plainly."""
    schedule_steps = config.run.num_rollout * config.optimizer_steps
    launch(config, steps, do, schedule_steps=schedule_steps, last_stage="update")


@flow(name="train", on_cancellation=[cancel_jobs])
def train(config: str = "", overrides: dict[str, Any] | None = None) -> None:
    """Train by the TOML file `config`, with `overrides` (setting -> value) on top."""
    run(load_config(config or None, overrides), stage)
