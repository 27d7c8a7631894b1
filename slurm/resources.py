"""What a job asks of the cluster, and the same in sbatch's words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

PLAIN = ("partition", "account", "qos", "constraint", "exclude", "reservation")


@dataclass(frozen=True)
class Resources:
    """One allocation; empty text and 0 leave the choice to the cluster."""

    partition: str = ""
    account: str = ""
    qos: str = ""
    constraint: str = ""
    reservation: str = ""
    exclude: str = ""
    nodes: int = 1
    tasks_per_node: int = 1
    gpus_per_node: int = 0
    cpus_per_task: int = 1
    mem_gb: float = 0.0
    minutes: int = 60
    extra: Mapping[str, str | int] = field(default_factory=dict)

    @property
    def num_ranks(self) -> int:
        """Processes of the job, over all nodes."""
        return self.nodes * self.tasks_per_node

    def sbatch_options(self) -> dict[str, Any]:
        """Options of sbatch by their long names (with `_` for `-`)."""
        options: dict[str, Any] = {
            "time": self.minutes,
            "nodes": self.nodes,
            "ntasks_per_node": self.tasks_per_node,
            "cpus_per_task": self.cpus_per_task,
        }
        options |= {name: value for name in PLAIN if (value := getattr(self, name))}
        if self.gpus_per_node:
            options["gpus_per_node"] = self.gpus_per_node
        if self.mem_gb:
            options["mem"] = f"{round(self.mem_gb * 1024)}M"
        return options | dict(self.extra)
