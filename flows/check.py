"""`relax check --cluster`: would this cluster take the run's jobs, and do its nodes work?"""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from pathlib import Path

from relax.config import Config
from relax.errors import ConfigError
from relax.flags import build_parser, load_config, overrides_of, parse_flags
from slurm import probe, records
from slurm.errors import JobError
from slurm.jobs import log_tail
from slurm.outcome import Done, Failed
from slurm.submit import Order, submit
from slurm.watch import Watch
from tasks.code import CHECKOUT
from tasks.placing import PERFORM_ALL, resources_of, site_of

ABOUT = "Ask the cluster, before a run does, whether its jobs would be accepted and work."
MODULES = ("relax", "slurm", "torch", "transformers", "pyarrow", "submitit")
STAGES = ("rollout", "reward", "advantage", "update")


def check(argv: Sequence[str]) -> int:
    """`relax check --cluster [--run]`; 1 where something is not as asked."""
    parser = build_parser("relax check", ABOUT)
    parser.add_argument("--cluster", action="store_true", help="ask sinfo and sbatch --test-only")
    parser.add_argument("--run", action="store_true", help="also run a one-minute job in each")
    known = parse_flags(parser, argv)
    config = load_config(known.config, overrides_of(known))
    if "cluster" not in known:
        raise ConfigError("give --cluster, and --run to try the nodes as well")
    root = Path(config.run.run_dir or ".").absolute()
    fine = True
    for stages, order in orders(config, root).items():
        fine = ask(order, stages, root) and fine
        if fine and "run" in known:
            fine = try_out(order, root) and fine
    return 0 if fine else 1


def orders(config: Config, root: Path) -> dict[str, Order]:
    """One order for each allocation, under the names of its stages."""
    users: dict[str, list[str]] = {}
    for stage in STAGES:
        if config.placement_of(stage) == "job":
            users.setdefault(config.allocation_of(stage), []).append(stage)
    if not users:
        raise ConfigError('no stage has placement = "job"; give --placement job')
    return {
        ", ".join(stages): Order(
            executor="slurm",
            name=f"{root.name}/check/{stages[0]}",
            target=PERFORM_ALL,
            calls=({},),
            attempt="check",
            resources=resources_of(config, stages[0]),
            allocation=allocation,
            code=CHECKOUT,
            site=site_of(config),
        )
        for allocation, stages in users.items()
    }


def ask(order: Order, stages: str, root: Path) -> bool:
    """Print what sinfo and the scheduler say about one allocation."""
    try:
        offered = probe.partitions()
    except JobError as error:
        first = str(error).splitlines()[0].removeprefix("check: ")
        raise JobError(f"SLURM does not answer: {first}; run this where jobs can be sent") from None
    found = probe.faults(order.resources, offered)
    print(f"allocation {order.allocation or '(none)'} ({stages}):")
    for fault in found:
        print(f"  {fault}")
    there = offered.get(order.resources.partition)
    if there is not None:
        print(f"  the largest that fits partition {there.name}: {probe.largest(there)}")
    if found:
        return False
    print(f"  accepted: {probe.scheduler_says(root, order)}")
    return True


def try_out(order: Order, root: Path) -> bool:
    """Run the probe in one allocation and print what each rank found."""
    token = uuid.uuid4().hex
    folder = root / "jobs" / f"check-{token[:8]}"
    records.claim(folder, {})
    (folder / "token").write_text(token)
    call = {
        "modules": list(MODULES),
        "folder": str(folder),
        "token": token,
        "gpus": order.resources.gpus_per_node,
    }
    given = {**order.__dict__, "target": "slurm.probe:on_node", "calls": (call,)}
    job = submit(folder, Order(**given))
    watch = Watch()

    def answered() -> bool:
        return len(list(folder.glob("probe-*.json"))) == order.resources.num_ranks

    while not isinstance(outcome := job.outcome(watch, answered), Done):
        time.sleep(0.2)
        if isinstance(outcome, Failed):
            print(f"  job {job.job_id}: {outcome.reason}\n{log_tail(folder, 15)}")
            return False
    return report(folder)


def report(folder: Path) -> bool:
    """Print each rank's findings."""
    fine = True
    for path in sorted(folder.glob("probe-*.json")):
        found = records.read(path) or {}
        for name, test in found.items():
            if isinstance(test, dict):
                fine = fine and test["fine"]
                mark = "fine" if test["fine"] else "NOT FINE"
                print(f"  rank {found['rank']} on {found['host']}: {name} {mark}: {test['said']}")
    return fine
