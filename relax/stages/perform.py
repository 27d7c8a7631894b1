"""Run one stage of a run to its commit: the same call inline, in a job or in a test."""

from __future__ import annotations

import importlib
import os
import time
from dataclasses import dataclass, field
from typing import Any

from relax.stages.keys import done, key_parts
from relax.stages.rounds import row_of
from relax.store import Manifest, Output, Run
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


def perform(run_dir: str, step: int, name: str, attempt: str, warm: Warm | None = None) -> Manifest:
    """Run stage `name` of `step` unless it is done, commit it, return the committed manifest."""
    run = Run.open(run_dir)
    manifest = done(run, step, name)
    if manifest is not None:
        return manifest
    stage, start = row_of(run, step, name), time.perf_counter()
    output = Output(run.root, step, name, attempt=attempt, key_parts=key_parts(run, step, stage))
    make_deterministic(run.config.run.num_threads)
    output.measure("started", time.time())
    output.measure("host", text=os.uname().nodename)
    warm = warm or Warm()
    try:
        _load(stage.entry)(run.config, Inputs(run, step), output, warm)
        output.measure("seconds/total", time.perf_counter() - start)
        manifest = output.commit()
    except OSError as error:
        manifest = output.yield_to_winner(error)
    except BaseException:
        output.discard()
        raise
    if manifest.policy is not None:
        warm.learners_at = manifest.identity if manifest.attempt == attempt else ""
    run.tidy(manifest)
    return manifest


def _load(entry: str) -> Any:
    module, function = entry.split(":")
    return getattr(importlib.import_module(module), function)
