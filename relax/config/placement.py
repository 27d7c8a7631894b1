"""Where stages run, and what their jobs ask of a cluster: two sections of the configuration."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationInfo, model_validator

from relax.config.fields import (
    Fault,
    NonNegative,
    NonNegativeInt,
    Placement,
    PositiveInt,
    Section,
    told,
    unkeyed,
)


class PlacementSection(Section):
    """Where stages run: `inline` in the flow's process, `job` as a job of their own."""

    placement: Placement = unkeyed("inline")
    """Placement of every stage that has none of its own below."""
    rollout_placement: Placement | None = unkeyed(None)
    """Placement of `rollout` (and `evaluate`)."""
    reward_placement: Placement | None = unkeyed(None)
    """Placement of `reward`."""
    advantage_placement: Placement | None = unkeyed(None)
    """Placement of `advantage`."""
    update_placement: Placement | None = unkeyed(None)
    """Placement of `update` (and `sft`)."""
    rollout_array: NonNegativeInt = unkeyed(0)
    """Jobs of one array that share the shards of a rollout placed `job`; 0 or 1: no array."""
    executor: Literal["local", "slurm", "debug"] = unkeyed("local")
    """What runs a job: `slurm`, `local` processes of this machine, `debug` the flow's process."""
    job_timeout_min: PositiveInt = unkeyed(60)
    """Time limit of a job whose stage names no allocation, in minutes."""


class Allocation(Section):
    """What one kind of job asks of SLURM."""

    partition: str = ""
    """Partition; empty: the cluster's default."""
    account: str = ""
    """Account that is charged."""
    qos: str = ""
    """Quality of service."""
    constraint: str = ""
    """Features that nodes must have."""
    reservation: str = ""
    """Reservation to run in."""
    exclude: str = ""
    """Nodes to keep away from."""
    nodes: PositiveInt = 1
    """Nodes."""
    tasks_per_node: PositiveInt = 1
    """Ranks on each node: one per GPU for the trainer."""
    gpus_per_node: NonNegativeInt = 0
    """GPUs on each node."""
    cpus_per_task: PositiveInt = 1
    """CPUs of each rank; a job that gets fewer fails at its start."""
    mem_gb: NonNegative = 0.0
    """Memory of each node in GB; 0: the partition's default."""
    minutes: PositiveInt = 60
    """Time limit."""
    extra: dict[str, str | int] = Field(default_factory=dict)
    """Any other option of sbatch by its long name."""


def _from_json(value: Any) -> Any:
    """A flag gives the table as JSON."""
    return json.loads(value) if isinstance(value, str) else value


class SlurmSection(Section):
    """The cluster: what jobs ask for, and the site they run at."""

    site: str = unkeyed("")
    """Site profile: a TOML file with modules, container, caches and interfaces of one cluster."""
    python: str = unkeyed("")
    """Command that starts Python on a node; empty: the site's, else the flow's own interpreter."""
    allocations: Annotated[dict[str, Allocation], BeforeValidator(_from_json)] = unkeyed({})
    """Allocations by name: tables [slurm.allocations.NAME]; as a flag, JSON."""
    rollout_allocation: str = unkeyed("")
    """Allocation of `rollout` (and `evaluate`); consecutive stages of one share a job."""
    reward_allocation: str = unkeyed("")
    """Allocation of `reward`; empty: a job of its own with one CPU."""
    advantage_allocation: str = unkeyed("")
    """Allocation of `advantage`."""
    update_allocation: str = unkeyed("")
    """Allocation of `score` and `update` (and `sft`)."""
    submit_ahead: bool = unkeyed(False)
    """Submit the next job of a step with the one before it, to wait in the queue for its end."""
    local_models: bool = unkeyed(False)
    """Read the given models from copies on each node's own disk (the site's local_dir)."""
    detach: bool = unkeyed(False)
    """Leave jobs running when the flow is cancelled; a crashed flow leaves them in any case."""

    @model_validator(mode="after")
    def _allocations_exist(self, info: ValidationInfo) -> SlurmSection:
        told(info, self._missing_allocations())
        return self

    def _missing_allocations(self) -> Iterator[Fault]:
        known = ", ".join(sorted(self.allocations)) or "none"
        for stage in ("rollout", "reward", "advantage", "update"):
            name = getattr(self, f"{stage}_allocation")
            if name and name not in self.allocations:
                yield (
                    ("allocations", f"{stage}_allocation"),
                    f"slurm.{stage}_allocation = {name!r}: no such allocation; "
                    f"[slurm.allocations] has: {known}",
                )
