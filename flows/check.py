"""`relax check --cluster`: would this cluster take the run's jobs, and do its nodes work?"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

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
PROBE_MINUTES = 5
"""Time limit of a probe: what it does takes seconds, but imports over a network may not."""


def check(argv: Sequence[str]) -> int:
    """`relax check --cluster [--run]`; 1 where something is not as asked."""
    parser = build_parser("relax check", ABOUT)
    parser.add_argument("--cluster", action="store_true", help="ask sinfo and sbatch --test-only")
    parser.add_argument("--run", action="store_true", help="also run a short job in each")
    parser.add_argument("--format", choices=("text", "json"), help="[text]")
    known = parse_flags(parser, argv)
    config = load_config(known.config, overrides_of(known))
    if "cluster" not in known:
        raise ConfigError("give --cluster, and --run to try the nodes as well")
    root = Path(config.run.run_dir or ".").absolute()
    as_json = vars(known).get("format") == "json"
    answers: list[Answer] = []
    for stages, order in orders(config, root).items():
        answer = ask(order, stages, root)
        answers.append(answer)
        if not as_json:
            print(as_text(answer), flush=True)
        if "run" in known and all(a.fine for a in answers):
            answer.ranks, answer.failure = try_out(order, root)
            if not as_json:
                print(ranks_as_text(answer), flush=True)
    if as_json:
        print(json.dumps({"allocations": [asdict(answer) for answer in answers]}, indent=1))
    return 0 if all(answer.fine for answer in answers) else 1


@dataclass
class Answer:
    """What the cluster says to one allocation."""

    allocation: str
    stages: str
    faults: list[str]
    largest: str = ""
    """The largest that the partition would take; empty where there is no such partition."""
    accepted: str = ""
    """When it would start, in the scheduler's words."""
    ranks: list[dict[str, Any]] = field(default_factory=list)
    """What each rank of a short job found: test -> {fine, said}."""
    failure: str = ""
    """Why that job did not get there, with the end of its log."""

    @property
    def fine(self) -> bool:
        """Whether all is as asked."""
        return not self.faults and not self.failure and all(t["fine"] for _, t in tests(self.ranks))


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


def ask(order: Order, stages: str, root: Path) -> Answer:
    """What sinfo and the scheduler say about one allocation."""
    try:
        offered = probe.partitions()
    except JobError as error:
        first = str(error).splitlines()[0].removeprefix("check: ")
        raise JobError(f"SLURM does not answer: {first}; run this where jobs can be sent") from None
    found = probe.faults(order.resources, offered)
    answer = Answer(order.allocation, stages, found)
    there = offered.get(order.resources.partition)
    if there is not None:
        answer.largest = f"partition {there.name}: {probe.largest(there)}"
    if not found:
        answer.accepted = probe.scheduler_says(root, order)
    return answer


def try_out(order: Order, root: Path) -> tuple[list[dict[str, Any]], str]:
    """Run the probe in one allocation: what each rank found, and why the job failed if it did."""
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
    short = replace(order.resources, minutes=min(order.resources.minutes, PROBE_MINUTES))
    target = "slurm.probe:on_node"
    job = submit(folder, replace(order, target=target, calls=(call,), resources=short))
    watch = Watch()

    def answered() -> bool:
        return len(list(folder.glob("probe-*.json"))) == order.resources.num_ranks

    while not isinstance(outcome := job.outcome(watch, answered), Done):
        time.sleep(0.2)
        if isinstance(outcome, Failed):
            return [], f"job {job.job_id}: {outcome.reason}\n{log_tail(folder, 15)}"
    return [records.read(path) or {} for path in sorted(folder.glob("probe-*.json"))], ""


# --- text ----------------------------------------------------------------------------------------


def as_text(answer: Answer) -> str:
    """What was said to one allocation, for people."""
    lines = [f"allocation {answer.allocation or '(none)'} ({answer.stages}):", *answer.faults]
    lines += [f"the largest that fits {answer.largest}"] if answer.largest else []
    lines += [f"accepted: {answer.accepted}"] if answer.accepted else []
    return "\n  ".join(lines)


def ranks_as_text(answer: Answer) -> str:
    """What each rank found, a line a test."""
    if answer.failure:
        return f"  {answer.failure}"
    return "\n".join(
        f"  {where} {'fine' if test['fine'] else 'NOT FINE'}: {test['said']}"
        for where, test in tests(answer.ranks)
    )


def tests(ranks: Sequence[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each test of each rank, after whose and which it is."""
    for found in ranks:
        for name, test in found.items():
            if isinstance(test, dict):
                yield f"rank {found['rank']} on {found['host']}: {name}", test
