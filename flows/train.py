"""The flow `train`: rollout, reward, advantage, update, once per step."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from prefect import flow
from prefect.client.schemas.objects import State

from flows.engine import cancel_run_jobs, run_in_prefect
from flows.launch import Around, Do, launch
from relax.algorithms import rules
from relax.config import Config
from relax.stages.rounds import rounds
from tasks.session import Session


def steps(session: Session, do: Do) -> None:
    """The whole run; a stage that is committed already returns at once."""
    config, run = session.config, session.run
    for step in range(run.first_step, config.run.num_rollout):
        if evaluation_due(config, step):
            do(session, step, "evaluate")
        for number in rounds(config, session.run, step):
            do(session, step, f"rollout.{number}")
            do(session, step, f"reward.{number}")
        do(session, step, "rollout")
        do(session, step, "reward")
        if rules.scores_needed(config):
            do(session, step, "score")
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


def run(config: Config, do: Do, around: Around = nullcontext) -> None:
    """Train; `do` runs one stage, as a Prefect task or plainly."""
    launch(config, "train", steps, do, around)


@flow(name="train", on_cancellation=[cancel_run_jobs])
def train(config: str = "", overrides: dict[str, Any] | None = None) -> State | None:
    """Train by the TOML file `config`, with `overrides` (setting -> value) on top."""
    return run_in_prefect(run, config, overrides)
