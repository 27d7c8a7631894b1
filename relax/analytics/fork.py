"""`relax fork RUN NEW --at-step N`: a run that goes on from step N of another, as it likes."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from relax.errors import ConfigError
from relax.flags import command_parser
from relax.store import Run, disk

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
    _check(run, step, new)
    scratch = new.with_name(f".{new.name}.part")
    disk.remove_tree(scratch)
    for folder in _history(run, step):
        _link_tree(folder, scratch / folder.relative_to(run.root))
    _write_records(run, step, new, scratch)
    disk.sync_tree(scratch)
    disk.rename(scratch, new)
    disk.fsync_dir(new.parent)
    print(
        f"{new}: steps 0 to {step - 1} of {run.root}; "
        f"`relax train ... --run-dir {given.new}` goes on with step {step}"
    )
    return 0


def _check(run: Run, step: int, new: Path) -> None:
    """Refuse a step without a checkpoint: only from one can another training start."""
    if new.exists():
        raise ConfigError(f"{new}: exists; give a directory that does not")
    possible = sorted(version for version, *_ in run.checkpoints(run.num_updates()))
    if step not in possible:
        steps = ", ".join(map(str, possible)) or "none"
        raise ConfigError(
            f"--at-step {step}: {run.root} has no checkpoint there; steps with one: {steps} "
            "(--save-interval and --max-actor-ckpt-to-keep decide)"
        )


def _history(run: Run, step: int) -> Iterator[Path]:
    """The directories that a run needs to go on with `step`: stages, policies, checkpoint."""
    for folder in sorted((run.root / "steps").glob("[0-9]*/[a-z]*")):
        if int(folder.parent.name) < step and run.manifest(int(folder.parent.name), folder.name):
            yield folder
    for version in sorted({step, run.config.reference_version(step)} - {0}):
        yield run.policy_dir(version)
    (checkpoint,) = (path for version, path, _ in run.checkpoints(step) if version == step)
    yield checkpoint


def _link_tree(source: Path, target: Path) -> None:
    """Committed files are never written again, so both runs may hold the same ones."""
    shutil.copytree(source, target, copy_function=_link)


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without hard links
        shutil.copyfile(source, target)


def _write_records(run: Run, step: int, new: Path, scratch: Path) -> None:
    record = json.loads((run.root / "run.json").read_bytes())
    settings = max((run.root / "config").glob("[0-9]*.json"))
    accepted = json.loads(settings.read_bytes())
    accepted["config"]["run"]["run_dir"] = str(new)
    disk.make_dir(scratch / "config")
    for path, value in (
        (scratch / "config" / "0001.json", accepted),
        (scratch / "run.json", {**record, "fork": {"run": str(run.root), "at_step": step}}),
    ):
        disk.write_bytes(path, (json.dumps(value, indent=1) + "\n").encode())
