"""`relax show RUN`: steps, stages, states, versions and sizes; or one response, token by token."""

from __future__ import annotations

import itertools
import json
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from relax.analytics.sample import COLOURS, show_sample
from relax.errors import ArtifactError, ConfigError
from relax.flags import command_parser
from relax.schema import IDS_PER_STEP
from relax.sizes import in_bytes
from relax.stages import STAGES, is_round
from relax.stages.rounds import round_of
from relax.store import Run, disk
from relax.store.commit import step_dir
from relax.store.run import read_records

EXAMPLES = """examples:
  relax show runs/x
  relax show runs/x --step 12
  relax show runs/x --step 12 --sample 3 --color advantage"""


@dataclass(frozen=True)
class StepState:
    """One step as it stands: stage -> committed, unfinished or damaged; rounds come last."""

    step: int
    stages: dict[str, str]
    policy: int | None
    """Version that the step published, and whether it, and a checkpoint of it, are still there."""
    has_policy: bool
    has_checkpoint: bool
    bytes: int

    @property
    def rounds(self) -> int:
        """Rounds of dynamic sampling that were begun."""
        return max(map(round_of, self.stages), default=0)

    @property
    def worst_round(self) -> str:
        """damaged or unfinished where a stage of a round is; else committed, of none ""."""
        states = [state for name, state in self.stages.items() if is_round(name)]
        return max(states, key=list(MARKS).index, default="")


def show(argv: Sequence[str]) -> int:
    """Print what a run holds."""
    parser = command_parser("relax show", "What a run holds, or one of its responses.", EXAMPLES)
    parser.add_argument("run", help="directory of the run")
    parser.add_argument("--step", type=int, help="only this step")
    parser.add_argument("--sample", type=int, help="one response: sample_id or place in the step")
    parser.add_argument("--color", choices=COLOURS, default="logp", help="of its tokens [logp]")
    parser.add_argument("--tokens", action="store_true", help="a row for each token of the sample")
    parser.add_argument("--format", choices=("text", "json"), default="text", help="[text]")
    given = parser.parse_args(argv)
    run = Run.open(given.run)
    if given.sample is not None:
        step, place = _place(given.step, given.sample)
        show_sample(run, step, step * IDS_PER_STEP + place, given.color, given.tokens)
        return 0
    states = [s for s in step_states(run) if given.step in (None, s.step)]
    if given.step is not None and not states:
        raise ConfigError(f"--step {given.step}: nothing there; {_steps_there(run)}")
    if given.format == "json":
        print(json.dumps({**about(run), "steps": [asdict(s) for s in states]}, indent=1))
    else:
        _print(run, states)
    return 0


def _place(step: int | None, sample: int) -> tuple[int, int]:
    """Step and place of a sample, which may be given as a sample_id."""
    if sample >= IDS_PER_STEP:
        if step not in (None, sample // IDS_PER_STEP):
            raise ConfigError(
                f"--step {step} --sample {sample}: that sample is of step "
                f"{sample // IDS_PER_STEP}; leave --step out, or give its place in the step"
            )
        return sample // IDS_PER_STEP, sample % IDS_PER_STEP
    if step is None:
        raise ConfigError(f"--sample {sample}: of which step? give --step, or a whole sample_id")
    return step, sample


def _steps_there(run: Run) -> str:
    steps = [s.step for s in step_states(run)]
    return f"the run has steps {steps[0]} to {steps[-1]}" if steps else "the run has no step yet"


def about(run: Run) -> dict[str, Any]:
    """What run.json and the settings say."""
    record = read_records(run.root)[0]
    kept = ("command", "created", "relax", "git", "python", "packages")
    return {
        "run": str(run.root),
        **{name: record[name] for name in kept if name in record},
        "algorithm": run.config.algorithm.advantage_estimator,
        "model": run.config.model.hf_checkpoint,
        "num_rollout": run.config.run.num_rollout,
        "updates": run.num_updates(),
    }


def step_states(run: Run) -> list[StepState]:
    """Every step that has begun, in order."""
    numbers = sorted(int(p.name) for p in (run.root / "steps").glob("[0-9]*"))
    return [_state(run, step) for step in numbers]


def _state(run: Run, step: int) -> StepState:
    stages: dict[str, str] = {}
    size, published = 0, None
    begun = _begun(run, step)
    for name in _in_order({name for _, name, _ in run.stages(step)} | begun):
        try:
            manifest = run.manifest(step, name)
        except ArtifactError:
            stages[name] = "damaged"
            continue
        if manifest is not None:
            stages[name] = "committed"
            size += sum(entry.bytes for entry in manifest.tables.values())
            published = manifest if manifest.policy else published
        elif name in begun:
            stages[name] = "unfinished"
    policy = published.policy if published else None
    checkpoint = published.checkpoint if published else None
    return StepState(
        step=step,
        stages=stages,
        policy=None if policy is None else step + 1,
        has_policy=policy is not None and (run.root / policy.name).is_dir(),
        has_checkpoint=checkpoint is not None and (run.root / checkpoint.name).is_dir(),
        bytes=size,
    )


NAME = rf"(?:{'|'.join(STAGES)})(?:\.\d+)?"
LEFT = re.compile(rf"\.staging-({NAME})-.*|\.({NAME})\.parts")
"""What attempts at a stage have beside it until it is committed."""


def _begun(run: Run, step: int) -> set[str]:
    """Stages that somebody is, or was, about to make."""
    found = (LEFT.fullmatch(path.name) for path in step_dir(run.root, step).iterdir())
    return {match[1] or match[2] for match in found if match}


def _in_order(names: set[str]) -> list[str]:
    """The stages of a step, then its rounds; anything else that lies there is left out."""
    place = list(STAGES).index
    known = (name for name in names if re.fullmatch(NAME, name))
    return sorted(known, key=lambda name: (round_of(name), place(name.partition(".")[0])))


# --- text ----------------------------------------------------------------------------------------

MARKS = {"committed": "ok", "unfinished": "[yellow]unfinished[/]", "damaged": "[red]damaged[/]"}


def _print(run: Run, states: list[StepState]) -> None:
    known = about(run)
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 160)
    for line in _headline(known, states):
        console.print(line, markup=False, soft_wrap=True)
    used = [name for name in STAGES if any(name in s.stages for s in states)]
    rounds = ["rounds"] if any(s.rounds for s in states) else []
    table = Table(header_style="bold")
    for name in ("step", *rounds, *used, "policy", "checkpoint", "size"):
        table.add_column(name, justify="right" if name in ("step", "size") else "left")
    for run_of in folded(states):
        table.add_row(*_row(run_of, used, bool(rounds)))
    console.print(table)


def _headline(known: dict[str, Any], states: list[StepState]) -> Iterable[str]:
    done = f"{known['updates']} of {known['num_rollout']} updates"
    yield f"{known['run']}: {done}, {known['algorithm']}"
    yield f"  model    {known['model']}"
    yield f"  command  {known.get('command', '')}"
    yield f"  created  {known.get('created', '')}, relax {known.get('relax', '')}"
    root = Path(known["run"])
    sizes = {name: disk.size(root / name) for name in ("policies", "checkpoints")}
    sizes = {"tables": sum(s.bytes for s in states), **sizes}
    yield "  size     " + ", ".join(f"{name} {in_bytes(size)}" for name, size in sizes.items())


def folded(states: list[StepState]) -> list[list[StepState]]:
    """Neighbouring steps that differ in number, size and finished rounds only, together."""

    def same(state: StepState) -> tuple:
        stages = tuple(item for item in state.stages.items() if not is_round(item[0]))
        return stages, state.worst_round, state.has_policy, state.has_checkpoint

    groups = [list(group) for _, group in itertools.groupby(states, same)]
    return [part for group in groups for part in _without_gaps(group)]


def _without_gaps(group: list[StepState]) -> Iterable[list[StepState]]:
    by_gap = itertools.groupby(enumerate(group), lambda pair: pair[1].step - pair[0])
    return [[state for _, state in part] for _, part in by_gap]


def _row(states: list[StepState], used: list[str], with_rounds: bool) -> list[str]:
    first, last = states[0], states[-1]
    span = str(first.step) if first is last else f"{first.step}-{last.step}"
    counts = sorted({s.rounds for s in states})
    mark = "" if first.worst_round in ("", "committed") else f" {MARKS[first.worst_round]}"
    rounds = (str(counts[0]) if len(counts) == 1 else f"{counts[0]}-{counts[-1]}") + mark
    versions = str(first.policy) if first is last else f"{first.policy}-{last.policy}"
    policy = "" if first.policy is None else versions + ("" if first.has_policy else " (gone)")
    return [
        span,
        *([rounds] if with_rounds else []),
        *(MARKS.get(first.stages.get(name, ""), "") for name in used),
        policy,
        "ok" if first.has_checkpoint else "",
        in_bytes(sum(s.bytes for s in states)),
    ]
