"""`relax verify RUN`: is what is on the disk what the manifests say? And `relax export`."""

from __future__ import annotations

import shutil
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from relax.errors import ArtifactError, ConfigError
from relax.flags import command_parser
from relax.schema import TABLES
from relax.store import Manifest, Run, disk, read_table
from relax.store.arrow import content_hash
from relax.store.manifest import digest

VERIFY_EXAMPLES = """example:
  relax verify runs/x
exit code: 0 all as committed, 1 something differs (each fault is one line)"""
EXPORT_EXAMPLES = """example:
  relax export runs/x --step 99 model/    the policy that step 99 published"""


def verify(argv: Sequence[str]) -> int:
    """Recompute every content hash of a run."""
    parser = command_parser(
        "relax verify",
        "Recompute the content hash of every committed table, policy and checkpoint.",
        VERIFY_EXAMPLES,
    )
    parser.add_argument("run", help="directory of the run")
    given = parser.parse_args(argv)
    run, count, start = Run.open(given.run), Counter[str](), time.perf_counter()
    found = 0
    for fault in faults(run, count):
        print(fault)
        found += 1
    print(
        f"{run.root}: {count['stages']} stages, {count['tables']} tables, "
        f"{count['policies']} policies, {count['checkpoints']} checkpoints: "
        + (f"{found} differ from their manifests" if found else "all as committed")
        + (f"; {count['gone']} removed by retention" if count["gone"] else "")
        + f" ({time.perf_counter() - start:.1f} s)"
    )
    return 1 if found else 0


def faults(run: Run, count: Counter[str]) -> Iterator[str]:
    """One line for each thing on disk that is not what its manifest says."""
    for step, name, folder in run.stages():
        try:
            manifest = run.manifest(step, name)
        except ArtifactError as error:
            yield str(error)
            continue
        if manifest is None:
            yield f"{folder}: no manifest.json; not committed, move it aside"
            continue
        count["stages"] += 1
        yield from _stage_faults(run, manifest, folder, count)


def _stage_faults(run: Run, manifest: Manifest, folder: Path, count: Counter[str]) -> Iterator[str]:
    if digest(manifest.key_parts) != manifest.key:
        yield f"{folder}/manifest.json: key is not the hash of key_parts; it was edited"
    for stage, content in manifest.key_parts.get("inputs", {}).items():
        above = run.manifest(manifest.step, stage)
        if above is None or above.content != content:
            yield f"{folder}: made from another {stage} than the one beside it"
    for name, entry in manifest.tables.items():
        count["tables"] += 1
        path = folder / f"{name}.arrow"
        try:
            found = content_hash(read_table(path, TABLES[name]))
        except ArtifactError as error:
            yield str(error)
            continue
        if found != entry.hash:
            yield f"{path}: content is {found[:12]}, its manifest says {entry.hash[:12]}"
    yield from _published_faults(run, manifest, count)


def _published_faults(run: Run, manifest: Manifest, count: Counter[str]) -> Iterator[str]:
    from relax.trainer.checkpoint import checked_hash
    from relax.trainer.publish import policy_hash

    for published, hashed, kind in (
        (manifest.policy, policy_hash, "policies"),
        (manifest.checkpoint, checked_hash, "checkpoints"),
    ):
        if published is None:
            continue
        path = run.root / published.name
        if not path.is_dir():
            count["gone"] += 1
            continue
        count[kind] += 1
        try:
            found = hashed(path)
        except (ArtifactError, OSError) as error:
            yield f"{path}: {error}"
            continue
        if found != published.hash:
            yield f"{path}: content is {found[:12]}, its manifest says {published.hash[:12]}"


def export(argv: Sequence[str]) -> int:
    """Copy the policy that a step published, or rebuild it from that step's checkpoint."""
    parser = command_parser(
        "relax export",
        "The policy that a step published (Hugging Face layout), or its checkpoint holds.",
        EXPORT_EXAMPLES,
    )
    parser.add_argument("run", help="directory of the run")
    parser.add_argument("out", type=Path, help="directory to make")
    parser.add_argument("--step", type=int, required=True, help="step that published it")
    given = parser.parse_args(argv)
    run = Run.open(given.run)
    if not 0 <= given.step < run.num_updates():
        raise ConfigError(f"--step {given.step}: no such step; {there(run)}")
    with disk.new_directory(given.out) as scratch:
        if can_rebuild(run, given.step + 1):
            _rebuild(run, given.step + 1, scratch)
        else:
            shutil.copytree(policy_of(run, given.step), scratch)
    print(f"{given.out}: policy {given.step + 1} of {run.root}")
    return 0


def can_rebuild(run: Run, version: int) -> bool:
    """Whether a policy that retention removed is still in a checkpoint."""
    if not 0 < version <= run.num_updates() or _is_there(run, version):
        return False
    return version in {found for found, *_ in run.checkpoints(version)}


def _rebuild(run: Run, version: int, directory: Path) -> None:
    from relax.stages.training import rebuild_policy  # loads torch

    rebuild_policy(run, version, directory)


def policy_of(run: Run, step: int) -> Path:
    """Directory of the policy that `step` published; ArtifactError names those that are there."""
    try:
        return run.policy_dir(step + 1)
    except ArtifactError as error:
        if _is_there(run, step + 1):
            raise
        raise ArtifactError(
            f"{run.root}: the policy of step {step} was removed by retention, and no checkpoint "
            f"holds it; {there(run)}"
        ) from error


def there(run: Run) -> str:
    """Which steps still have a policy, there or in a checkpoint."""
    found = [v for v in range(1, run.num_updates() + 1) if _is_there(run, v) or can_rebuild(run, v)]
    return f"steps whose policy is there: {', '.join(str(v - 1) for v in found) or 'none'}"


def _is_there(run: Run, version: int) -> bool:
    manifest = run.published(version)
    return bool(manifest and manifest.policy and (run.root / manifest.policy.name).is_dir())
