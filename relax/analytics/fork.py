"""`relax fork RUN NEW --at-step N`: a run that goes on from step N of another, as it likes."""

from __future__ import annotations

import itertools
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from relax.errors import ConfigError
from relax.flags import command_parser
from relax.store import Run, disk
from relax.store.run import read_records

EXAMPLES = """example:
  relax fork runs/x runs/y --at-step 20
  relax train recipe.toml --run-dir runs/y --lr 1e-6     steps 20, 21, ... with another lr"""


def fork(argv: Sequence[str]) -> int:
    """Make a run whose first steps are those of another; nothing is computed."""
    parser = command_parser(
        "relax fork",
        "A new run with the steps before N of another; from N on its settings may differ.",
        EXAMPLES,
    )
    parser.add_argument("run", help="directory of the run to take the steps from")
    parser.add_argument("new", type=Path, help="directory to make")
    parser.add_argument("--at-step", type=int, required=True, help="first step that is to differ")
    given = parser.parse_args(argv)
    run, step, new = Run.open(given.run), given.at_step, given.new.absolute()
    _check_step(run, step)
    origin = {"fork": {"run": str(run.root), "at_step": step}}
    with disk.new_directory(new) as scratch:
        link_history(run, step, scratch)
        write_records(run, scratch, {"run": {"run_dir": str(new)}}, **origin)
    print(
        f"{new}: steps 0 to {step - 1} of {run.root}; "
        f"`relax train ... --run-dir {given.new}` goes on with step {step}"
    )
    return 0


def _check_step(run: Run, step: int) -> None:
    """Refuse a step without a checkpoint: only from one can another training start."""
    possible = sorted(version for version, *_ in run.checkpoints(run.num_updates()))
    if step not in possible:
        steps = ", ".join(map(str, possible)) or "none"
        raise ConfigError(
            f"--at-step {step}: {run.root} has no checkpoint there; steps with one: {steps} "
            "(--save-interval and --max-actor-ckpt-to-keep decide)"
        )


def link_history(run: Run, step: int, target: Path) -> None:
    """Give `target` all that a run needs to go on with `step`.

    Committed files are never written again, so both runs may hold the same ones.
    """
    for folder in _history(run, step):
        copy = target / folder.relative_to(run.root)
        shutil.copytree(folder, copy, copy_function=_link)


def _history(run: Run, step: int) -> Iterator[Path]:
    """The directories: stages before the step, policies, the newest checkpoint."""
    for made_at, stage, folder in run.stages():
        if made_at < step and run.manifest(made_at, stage):
            yield folder
    for version in sorted({step, run.config.reference_version(step)} - {0}):
        yield run.policy_dir(version)
    yield from (path for _, path, _ in itertools.islice(run.checkpoints(step), 1))


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without hard links
        shutil.copyfile(source, target)


def write_records(
    run: Run, target: Path, changed: Mapping[str, Mapping[str, Any]], **added: Any
) -> None:
    """Give `target` the run's records, with settings `changed` and `added` to run.json."""
    record, _, accepted = read_records(run.root)
    for section, settings in changed.items():
        accepted["config"][section] |= settings
    disk.make_dir(target / "config")
    for name, value in (("config/0001.json", accepted), ("run.json", record | added)):
        disk.write_bytes(target / name, (json.dumps(value, indent=1) + "\n").encode())
