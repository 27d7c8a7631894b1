"""The stages as Prefect tasks: flat, uncached, named 0012-rollout. Files alone remember."""

from __future__ import annotations

from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.states import Completed

from tasks.session import Session
from tasks.stage import perform


@task(cache_policy=NO_CACHE, persist_result=False, task_run_name="{step:04d}-{stage}")
def stage(session: Session, step: int, stage: str) -> State:
    """Run one stage; one that was done already shows as Reused. Its job's log is the task's."""
    session.relay = get_run_logger().info
    _, reused = perform(session, step, stage)
    return Completed(name="Reused", message="found committed") if reused else Completed()
