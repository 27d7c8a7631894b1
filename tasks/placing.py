"""From settings to orders: which stages share a job, what it asks for, what it is called.

A rollout may be an array: the elements share its shards, and each is a job of its own.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from relax.config import Config
from relax.stages import is_round
from relax.stages.rounds import is_dynamic, prompts_per_round, round_of
from slurm.resources import Resources
from slurm.site import Site, load_site
from slurm.submit import Order

PERFORM_ALL = "relax.stages.perform:perform_all"
PERFORM_SHARDS = "relax.stages.perform:perform_shards"


def gang(config: Config, planned: Sequence[str], stage: str) -> tuple[str, ...]:
    """The stages that run in one job with `stage`: neighbours in the step of its allocation.

    The same for each of its members, so that two flows that ask for different ones claim the
    same job.
    """
    if is_round(stage):  # how many there will be no plan knows
        number = round_of(stage)
        planned = (f"rollout.{number}", f"reward.{number}")
    if stage not in planned or not config.allocation_of(stage):
        return (stage,)
    first = last = planned.index(stage)
    while first > 0 and _together(config, planned[first - 1], stage):
        first -= 1
    while last + 1 < len(planned) and _together(config, planned[last + 1], stage):
        last += 1
    return tuple(planned[first : last + 1])


def next_gang(config: Config, planned: Sequence[str], stage: str) -> tuple[str, ...]:
    """The stages of the job that follows in the step; () where none does, or nobody knows yet."""
    if is_round(stage) or stage not in planned:
        return ()
    rest = planned[planned.index(gang(config, planned, stage)[-1]) + 1 :]
    if not rest or config.placement_of(rest[0]) != "job":
        return ()
    return gang(config, planned, rest[0])


def _together(config: Config, one: str, other: str) -> bool:
    if dealt(config, one) or dealt(config, other):
        return False
    if is_round(one) != is_round(other):
        return False  # whether another round comes between them is not known yet
    same = config.allocation_of(one) == config.allocation_of(other)
    return same and config.placement_of(one) == config.placement_of(other) == "job"


def dealt(config: Config, stage: str, finished: Collection[int] = ()) -> list[list[int]]:
    """The shards that each element of the stage's array has to make; [] where it is no array.

    Elements that have nothing left are left out, and so each keeps its own shards.
    """
    if not stage.startswith("rollout") or (stage == "rollout" and is_dynamic(config)):
        return []
    count = -(-prompts_per_round(config) // config.rollout.rollout_shard_groups)
    size = min(config.placement.rollout_array, count)
    if size < 2:
        return []
    shares = [[n for n in range(place, count, size) if n not in finished] for place in range(size)]
    return [share for share in shares if share]


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
    config: Config,
    root: Path,
    *,
    code: Path,
    step: int,
    stages: Sequence[str],
    attempt: str,
    shares: Sequence[Sequence[int]] = (),
    after: str = "",
) -> Order:
    """The job of `stages` at `step` of the run in `root`; an array of one element a share."""
    common = {"run_dir": str(root), "step": step}
    parts = [{**common, "name": stages[0], "shards": list(share)} for share in shares]
    return Order(
        executor=config.placement.executor,
        name=f"{root.name}/{step:06d}/{stages[0]}",
        target=PERFORM_SHARDS if parts else PERFORM_ALL,
        calls=tuple(parts) or ({**common, "names": list(stages)},),
        attempt=attempt,
        resources=resources_of(config, stages[0]),
        allocation=config.allocation_of(stages[0]),
        code=code,
        site=site_of(config),
        after=after,
        labels={**labels(step, stages), **({SHARES: list(map(list, shares))} if parts else {})},
    )


SHARES = "shares"
"""What its records say of an array: the shards of each element."""


def labels(step: int, stages: Sequence[str]) -> Mapping[str, object]:
    """What a job is found by."""
    return {"step": step, "stages": list(stages)}
