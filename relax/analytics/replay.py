"""`relax replay RUN --step N`: compute a step once more and compare it with what was committed."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from relax.analytics.fork import link_history, write_records
from relax.errors import ConfigError
from relax.flags import command_parser
from relax.store import Manifest, Run, disk

EXAMPLES = """example:
  relax replay runs/x --step 12
exit code: 0 the same to the bit, 1 something differs (one line a stage).
Same bits need the same kind of machine, number of ranks and library versions."""


def replay(argv: Sequence[str]) -> int:
    """Perform every stage of a step again, beside the run, which stays as it is."""
    parser = command_parser(
        "relax replay",
        "Compute a step again in this process and compare it with what the run holds.",
        EXAMPLES,
    )
    parser.add_argument("run", help="directory of the run")
    parser.add_argument("--step", type=int, required=True, help="the step")
    given = parser.parse_args(argv)
    run = Run.open(given.run)
    if given.step < run.first_step:
        raise ConfigError(
            f"--step {given.step}: {run.root} was forked at step {run.first_step}; replay earlier "
            "ones in the run that they come from (see run.json)"
        )
    stages = committed_stages(run, given.step)
    if not stages:
        raise ConfigError(f"--step {given.step}: nothing of it is committed in {run.root}")
    for leftover in run.root.glob(".replay-*"):  # of one that was killed
        disk.remove_tree(leftover)
    same = True
    with tempfile.TemporaryDirectory(prefix=".replay-", dir=run.root) as scratch:
        for manifest, found in performed(run, stages, Path(scratch)):
            lines = list(differences(run, manifest, Path(scratch), found))
            print(f"{manifest.stage}: " + ("; ".join(lines) or "the same"), flush=True)
            same = same and not lines
    return 0 if same else 1


def committed_stages(run: Run, step: int) -> list[Manifest]:
    """The manifests of a step in the order in which its stages began."""
    found = [m for _, name, _ in run.stages(step) if (m := run.manifest(step, name)) is not None]
    return sorted(found, key=_started)


def performed(
    run: Run, stages: Sequence[Manifest], scratch: Path
) -> Iterator[tuple[Manifest, Manifest]]:
    """Each committed manifest with that of the stage performed again in `scratch`."""
    from relax.stages.perform import Warm, perform  # loads torch

    step, warm = stages[0].step, Warm()
    link_history(run, step, scratch)
    write_records(run, scratch, {"run": {"run_dir": str(scratch)}, "update": _layout(stages)})
    for manifest in stages:
        yield manifest, perform(str(scratch), step, manifest.stage, "replay", warm)


def _layout(stages: Sequence[Manifest]) -> dict[str, Any]:
    """How the update was laid out, which the run may do otherwise by now; here by one process."""
    noted = [manifest.notes["layout"] for manifest in stages if "layout" in manifest.notes]
    if not noted:
        return {}
    packed = not noted[0]["micro_batch_size"]
    return {**noted[0], "use_dynamic_batch_size": packed, "num_replicas": 1}


def differences(run: Run, old: Manifest, scratch: Path, new: Manifest) -> Iterator[str]:
    """What a stage made differently this time: columns of its tables, and its policy."""
    again = Run.open(scratch)
    for name in sorted(old.tables):
        if old.tables[name].hash != new.tables[name].hash:
            before = run.table(old.step, old.stage, name)
            after = again.table(old.step, old.stage, name)
            yield f"{name}: {_differing(before, after)} differ"
    if old.policy and new.policy and old.policy.hash != new.policy.hash:
        then, now = old.policy.hash[:12], new.policy.hash[:12]
        yield f"policy {old.step + 1}: {then} was committed, now {now}"


def _differing(before: pa.Table, after: pa.Table) -> str:
    if before.num_rows != after.num_rows:
        return f"{before.num_rows} rows, now {after.num_rows}: they"
    names = before.column_names
    return ", ".join(name for name in names if not before[name].equals(after[name]))


def _started(manifest: Manifest) -> float:
    return next(value for measure, value, _ in manifest.timing if measure == "started" and value)
