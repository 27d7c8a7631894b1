"""Run one stage of a run to its commit: the same call inline, in a job or in a test."""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from relax.stages import Stage
from relax.stages.keys import done, key_parts
from relax.stages.rounds import row_of
from relax.store import Manifest, Output, Run, disk
from relax.trainer import ranks
from relax.trainer.numerics import make_deterministic

# Nodes have no way out, and a log is no place for progress bars. Read when transformers is loaded.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")


@dataclass
class Warm:
    """What a process keeps between stages, and the hash of what it came from.

    It saves time and never changes a result: a holder whose hash is not the committed one is
    dropped and loaded anew.
    """

    learners: Any = None
    learners_at: str = ""
    engine: Any = None
    engine_at: str = ""
    prompts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Inputs:
    """What a stage may read: the run, at one step."""

    run: Run
    step: int
    shards: frozenset[int] | None = None
    """Of a stage made in shards, those that this attempt makes; None: all that are missing."""
    stop: Callable[[], bool] = lambda: False
    """Whether to leave the rest after the shard in hand."""


class Unfinished(Exception):
    """Shards of the stage are left, to others or to a later start: nothing to commit, no fault."""


def perform_all(
    run_dir: str, step: int, names: Sequence[str], attempt: str, stop: Callable[[], bool]
) -> bool:
    """Run stages one after another, each to its own commit, keeping warm what they share.

    Between stages and shards, where `stop` is true on rank 0, the rest is left. Returns whether
    all are done.
    """
    warm, through = Warm(), True
    for name in names:
        inputs = Inputs(Run.open(run_dir), step, stop=stop)
        if _from_first(stop()) or _perform(inputs, name, attempt, warm) is None:
            through = False
            break
    _leave()
    return through


def perform_shards(
    run_dir: str,
    step: int,
    name: str,
    shards: Sequence[int],
    *,
    attempt: str,
    stop: Callable[[], bool],
) -> bool:
    """Make some shards of a stage, and its commit where the others are there by then.

    An element of an array: whichever finds all shards commits the stage, and the first one counts.
    False where it was stopped before its own were through, perhaps.
    """
    inputs = Inputs(Run.open(run_dir), step, frozenset(shards), stop)
    stopped = _from_first(stop())
    manifest = None if stopped else _perform(inputs, name, attempt, Warm())
    stopped = stopped or _from_first(stop())
    _leave()
    return manifest is not None or not stopped


def perform(run_dir: str, step: int, name: str, attempt: str, warm: Warm | None = None) -> Manifest:
    """Run stage `name` of `step` unless it is done, commit it, return the committed manifest.

    In a job of several ranks every rank makes this call, and rank 0 alone decides and commits.
    """
    manifest = _perform(Inputs(Run.open(run_dir), step), name, attempt, warm or Warm())
    assert manifest is not None
    return manifest


def _perform(inputs: Inputs, name: str, attempt: str, warm: Warm) -> Manifest | None:
    """The committed manifest; None where shards are left."""
    started, run, step = time.time(), inputs.run, inputs.step
    stage = row_of(run, step, name)
    make_deterministic(run.config.run.num_threads)
    manifest = _from_first(done(run, step, name) if _rank() == 0 else None)
    if manifest is not None:
        return manifest
    if warm.engine is not None:
        importlib.import_module("relax.stages.engines").make_room(stage, warm)
    if _rank() == 0 or stage.runs_on == "every rank":
        manifest = _compute(inputs, stage, attempt, warm, started)
    manifest = _from_first(manifest)
    if manifest is None:
        return None
    if manifest.policy is not None:
        warm.learners_at = manifest.identity if manifest.attempt == attempt else ""
    if _rank() == 0:
        run.tidy(manifest)
    return manifest


def _compute(
    inputs: Inputs, stage: Stage, attempt: str, warm: Warm, started: float
) -> Manifest | None:
    """What rank 0 committed, or another attempt before it; None on other ranks, or Unfinished."""
    start, run, step = time.perf_counter(), inputs.run, inputs.step
    together = _size() > 1 and stage.runs_on == "every rank"
    gang = {"rank": _rank(), "barrier": ranks.barrier} if together else {}
    parts = key_parts(run, step, stage)
    output = Output(run.root, step, stage.name, attempt=attempt, key_parts=parts, **gang)
    output.measure("started", started)
    output.measure("host", text=os.uname().nodename)
    output.measure("ranks", _size() if together else 1)
    try:
        _load(stage.entry)(run.config, inputs, output, warm)
        output.measure("seconds/total", time.perf_counter() - start)
        return output.commit() if output.rank == 0 else None
    except Unfinished:
        output.discard()
        return None
    except OSError as error:
        if together:  # the others wait for this rank elsewhere; the next start finds a winner
            output.discard()
            raise disk.explained(error, output.final) from error
        return output.yield_to_winner(error)
    except BaseException:
        output.discard()
        raise


def _rank() -> int:
    return int(os.environ.get("RANK", "0")) if _size() > 1 else 0


def _size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def _from_first(value: Any) -> Any:
    """Rank 0's value on every rank; a lone process needs no group for that."""
    if _size() == 1:
        return value
    ranks.ensure_group()
    return ranks.from_first(value)


def _leave() -> None:
    if _size() > 1:
        ranks.leave_group()


def _load(entry: str) -> Any:
    module, function = entry.split(":")
    return getattr(importlib.import_module(module), function)
