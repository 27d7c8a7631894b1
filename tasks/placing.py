"""From settings to orders: which stages share a job, what it asks for, what it is called."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from relax.config import Config
from relax.stages import is_round
from slurm.resources import Resources
from slurm.site import Site, load_site
from slurm.submit import Order

PERFORM_ALL = "relax.stages.perform:perform_all"


def gang(config: Config, planned: Sequence[str], stage: str) -> tuple[str, ...]:
    """The stages that run in one job with `stage`: neighbours in the step of its allocation.

    The same for each of its members, so that two flows that ask for different ones claim the
    same job.
    """
    if stage not in planned or not config.allocation_of(stage):
        return (stage,)
    first = last = planned.index(stage)
    while first > 0 and _together(config, planned[first - 1], stage):
        first -= 1
    while last + 1 < len(planned) and _together(config, planned[last + 1], stage):
        last += 1
    return tuple(planned[first : last + 1])


def _together(config: Config, one: str, other: str) -> bool:
    if is_round(one) != is_round(other):
        return False  # whether another round comes between them is not known when they are planned
    same = config.allocation_of(one) == config.allocation_of(other)
    return same and config.placement_of(one) == config.placement_of(other) == "job"


def resources_of(config: Config, stage: str) -> Resources:
    """What the job of `stage` asks for."""
    name = config.allocation_of(stage)
    if not name:
        return Resources(minutes=config.placement.job_timeout_min)
    return Resources(**config.slurm.allocations[name].model_dump())


def site_of(config: Config) -> Site:
    """The site profile, with the run's own interpreter in it where one is set."""
    site = load_site(config.slurm.site) if config.slurm.site else Site()
    return replace(site, python=config.slurm.python) if config.slurm.python else site


def order_of(
    config: Config, root: Path, *, code: Path, step: int, stages: Sequence[str], attempt: str
) -> Order:
    """The job of `stages` at `step` of the run in `root`."""
    call = {"run_dir": str(root), "step": step, "names": list(stages)}
    return Order(
        executor=config.placement.executor,
        name=f"{root.name}/{step:06d}/{stages[0]}",
        target=PERFORM_ALL,
        calls=(call,),
        attempt=attempt,
        resources=resources_of(config, stages[0]),
        allocation=config.allocation_of(stages[0]),
        code=code,
        site=site_of(config),
        labels=labels(step, stages),
    )


def labels(step: int, stages: Sequence[str]) -> Mapping[str, object]:
    """What a job is found by."""
    return {"step": step, "stages": list(stages)}
