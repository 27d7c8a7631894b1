"""The flow `train`: rollout, reward, advantage, update, once per step."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any

from prefect import flow
from prefect.client.schemas.objects import State

from flows.engine import cancel_run_jobs, run_in_prefect
from flows.launch import Around, Do, launch
from relax.algorithms import rules
from relax.config import Config
from relax.stages.rounds import is_dynamic, rounds
from tasks.session import Session


def steps(session: Session, do: Do) -> None:
    """The whole run; a stage that is committed already returns at once."""
    config, run = session.config, session.run
    for step in range(run.first_step, config.run.num_rollout):
        if evaluation_due(config, step):
            do(session, step, "evaluate")
        for number in sampling_rounds(session, step):
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


def sampling_rounds(session: Session, step: int) -> Iterable[int]:
    """The rounds of dynamic sampling that a step needs, each told when it is asked for."""
    return rounds(session.config, session.run, step) if is_dynamic(session.config) else ()


def evaluation_due(config: Config, step: int) -> bool:
    """Before the first step, and every eval_interval steps."""
    if not config.evaluate.eval_prompt_data:
        return False
    interval = config.evaluate.eval_interval
    return step == 0 or (interval > 0 and step % interval == 0)


def run(config: Config, do: Do, around: Around = nullcontext) -> None:
    """Train; `do` runs one stage, as a Prefect task or plainly."""
    schedule_steps = config.run.num_rollout * config.optimizer_steps
    launch(
        config,
        steps,
        do,
        schedule_steps=schedule_steps,
        last_stage="update",
        around=around,
    )


@flow(name="train", on_cancellation=[cancel_run_jobs])
def train(config: str = "", overrides: dict[str, Any] | None = None) -> State | None:
    """Train by the TOML file `config`, with `overrides` (setting -> value) on top."""
    return run_in_prefect(run, config, overrides)
