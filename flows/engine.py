"""What a flow run shows and obeys in Prefect: its directory, its metrics, and being cancelled."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import UUID

from prefect import Flow, get_client, get_run_logger
from prefect.artifacts import create_link_artifact, create_table_artifact
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import FlowRun, State
from prefect.context import FlowRunContext
from prefect.states import Cancelled

from relax.algorithms.inheritance import load
from relax.analytics import open_run
from tasks.cancel import cancel_jobs
from tasks.prefect_tasks import stage
from tasks.session import Session, Stopped

ASK_EVERY_S = 2.0
COLUMNS = "(train|sft)/(loss|grad_norm|lr)|train/(kl_loss|entropy|ppo_kl)|eval/.*/reward_mean"
"""Metrics of the table artifact."""

Run = Callable[..., None]
"""A flow's body: run(config, do, around)."""


def run_in_prefect(run: Run, config: str, overrides: dict[str, Any] | None) -> State | None:
    """Run a flow's body inside its flow run; the state Cancelled when the server asked for it."""
    loaded, reset = load(config or None, overrides)
    if reset:
        get_run_logger().warning(reset)
    cancelling = threading.Event()

    @contextmanager
    def around(session: Session) -> Iterator[None]:
        link(session)
        with obeying(session, cancelling):
            try:
                yield
            finally:
                tabulate(session)

    try:
        run(loaded, stage, around)
    except Stopped as stopped:
        if not cancelling.is_set():  # a worker's TERM may come first
            with get_client(sync_client=True) as client:
                if not asked_to_cancel(client, own_id()):
                    raise
        return Cancelled(message=str(stopped))
    return None


def asked_to_cancel(client: SyncPrefectClient, run_id: UUID) -> bool:
    """Whether the server says that a flow run is to be cancelled."""
    state = client.read_flow_run(run_id).state
    return state is not None and state.is_cancelling()


def own_id() -> UUID:
    """Id of the flow run that this is called in."""
    context = FlowRunContext.get()
    assert context is not None and context.flow_run is not None
    return context.flow_run.id


def link(session: Session) -> None:
    """The run's directory, on the flow run's page."""
    root = session.run.root
    create_link_artifact(root.as_uri(), link_text=str(root), description="run directory")


def tabulate(session: Session) -> None:
    """One table artifact: the metrics by step."""
    if rows := by_step(session.run.root):
        create_table_artifact(rows, key="steps", description=f"steps of {session.run.root}")


def by_step(root: Path) -> list[dict[str, Any]]:
    """A row a step: the view `steps` and, where the run has them, the metrics of COLUMNS.

    A metric of several optimizer steps is their mean; None where a step has none.
    """
    run = open_run(root)
    steps = run.sql("SELECT * EXCLUDE (run) FROM steps")
    found = {row[0]: dict(zip(steps.columns, row, strict=True)) for row in steps.fetchall()}
    metrics = run.sql(
        "SELECT step, metric, avg(value) FROM metrics "
        f"WHERE regexp_full_match(metric, '{COLUMNS}') GROUP BY ALL ORDER BY metric"
    )
    for step, metric, value in metrics.fetchall():
        found.setdefault(step, {"step": step})[metric] = value
    columns = dict.fromkeys(name for row in found.values() for name in row)
    return [{name: found[step].get(name) for name in columns} for step in sorted(found)]


@contextmanager
def obeying(session: Session, cancelling: threading.Event) -> Iterator[None]:
    """Ask the server now and then whether this run is to be cancelled; no worker tells us."""
    run_id, over = own_id(), threading.Event()

    def watch() -> None:
        with get_client(sync_client=True) as client:
            while not over.wait(ASK_EVERY_S):
                if asked_to_cancel(client, run_id):
                    cancelling.set()
                    session.stopping.set()
                    return

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def cancel_run_jobs(flow: Flow, flow_run: FlowRun, state: State) -> None:
    """A cancelled flow takes its jobs with it. Runs in another process: files tell which."""
    del flow, state
    parameters = flow_run.parameters
    config, _ = load(parameters.get("config") or None, parameters.get("overrides") or {})
    if not config.slurm.detach:
        cancel_jobs(config.run.run_dir)
