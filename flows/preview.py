"""`--dry-run`: the plan of a run and the script of each kind of job; nothing is submitted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from flows.launch import Do, planned
from relax.config import Config
from relax.store import Run
from slurm.submit import script
from tasks.code import code_dir
from tasks.placing import dealt, gang, next_gang, order_of

BEFORE = "ID_OF_THE_JOB_BEFORE"
"""Stands in a script for what only a submission will know."""


def preview(config: Config, steps: Callable[[Any, Do], None]) -> str:
    """What `steps` would run where; one script for all jobs that differ by their step alone."""
    there = (Path(config.run.run_dir) / "run.json").exists()
    known = Run.open(config.run.run_dir) if there else None
    run = SimpleNamespace(
        first_step=known.first_step if known else 0,
        num_updates=known.num_updates if known else lambda: 0,
        manifest=lambda step, stage: None,
    )
    session = SimpleNamespace(config=config, run=run)
    jobs: dict[tuple[str, ...], list[int]] = {}
    inline: dict[str, int] = {}
    ahead: set[tuple[str, ...]] = set()
    for step, stages in planned(steps, session).items():
        for stage in stages:
            if config.placement_of(stage) == "inline":
                inline[stage] = inline.get(stage, 0) + 1
                continue
            if step not in jobs.setdefault(gang(config, stages, stage), []):
                jobs[gang(config, stages, stage)].append(step)
            if config.slurm.submit_ahead:
                ahead.add(next_gang(config, stages, stage))
    lines = [f"plan of {config.run.run_dir}: {config.run.num_rollout} steps"]
    lines += [f"  in the flow's process: {stage}, {count} times" for stage, count in inline.items()]
    lines += [_line(config, stages, steps_of) for stages, steps_of in jobs.items()]
    for stages, steps_of in jobs.items():
        after = BEFORE if stages in ahead else ""
        lines += ["", f"# --- {' + '.join(stages)}", _script(config, stages, steps_of[0], after)]
    return "\n".join(lines)


def _line(config: Config, stages: tuple[str, ...], steps: list[int]) -> str:
    allocation = config.allocation_of(stages[0])
    where = f"allocation {allocation}" if allocation else "no allocation"
    first_last = f"steps {steps[0]} to {steps[-1]}" if len(steps) > 1 else f"step {steps[0]}"
    return f"  job by {config.placement.executor} ({where}): {' + '.join(stages)}, {first_last}"


def _script(config: Config, stages: tuple[str, ...], step: int, after: str) -> str:
    root = Path(config.run.run_dir).absolute()
    order = order_of(
        config,
        root,
        code=code_dir(root, config),
        step=step,
        stages=stages,
        attempt="job-1",
        shares=dealt(config, stages[0]),
        after=after,
    )
    folder = root / "jobs" / f"{step:06d}-{stages[0]}-1"
    if order.executor == "slurm":
        return script(folder, order)
    return f"# {order.resources.num_ranks} process(es) of this machine, folder {folder}"
