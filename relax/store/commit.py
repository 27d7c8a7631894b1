"""One attempt at one stage: a private directory that becomes the stage's by a single rename.

Order, on which recovery rests: tables, policy and checkpoint are on the disk under names of this
attempt; then the manifest, which names them; then the rename that makes all of it exist at once.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa

from relax.errors import ArtifactError
from relax.schema import TABLES
from relax.store import disk
from relax.store.arrow import content_hash, write_table
from relax.store.manifest import (
    FORMAT,
    MANIFEST,
    Manifest,
    Published,
    TableEntry,
    digest,
    read_manifest,
)

POLICIES, CHECKPOINTS = "policies", "checkpoints"


def step_dir(root: Path, step: int) -> Path:
    """RUN/steps/000012."""
    return root / "steps" / f"{step:06d}"


def _alone() -> None:
    """The barrier of a single rank."""


class Output:
    """What one attempt has made so far; nobody else sees any of it before `commit`.

    All ranks of an attempt make the same calls. Rank 0 alone writes tables and commits; the
    others write their parts of what is published. `barrier` waits for all ranks.
    """

    def __init__(
        self,
        root: Path,
        step: int,
        stage: str,
        *,
        attempt: str,
        key_parts: dict[str, Any],
        final: Path | None = None,
        rank: int = 0,
        barrier: Callable[[], None] = _alone,
    ) -> None:
        self.root, self.step, self.stage, self.attempt = root, step, stage, attempt
        self.key, self.key_parts = digest(key_parts), key_parts
        self.rank, self.barrier = rank, barrier
        self.final = final or step_dir(root, step) / stage
        self.staging = self.final.parent / f".staging-{self.final.name}-{attempt}"
        self.tables: dict[str, TableEntry] = {}
        self.published: dict[str, Published] = {}
        self.notes: dict[str, Any] = {}
        self.timing: list[tuple[str, float | None, str | None]] = []
        if rank == 0:
            disk.remove_tree(self.staging)
            disk.make_dir(self.staging)

    def write(self, name: str, table: pa.Table) -> None:
        """Add a table of the kind `name` of the schema."""
        assert table.schema.equals(TABLES[name].schema, check_metadata=True), name
        if self.rank:
            return
        path = self.staging / f"{name}.arrow"
        disk.write_file(path, lambda p: write_table(p, table))
        self.tables[name] = TableEntry(
            bytes=path.stat().st_size, rows=table.num_rows, hash=content_hash(table)
        )

    def publish(self, kind: str, version: int, write: Callable[[Path], str]) -> None:
        """Add a policy or checkpoint: `write` fills a directory and returns its content hash.

        Every rank writes its part; the hash that rank 0 returns counts. What was written lies
        under a name of this attempt, and exists for readers once the manifest names it.
        """
        folder = self.root / kind
        staging = folder / f".staging-{version:06d}.{self.attempt}"
        if self.rank == 0:
            disk.remove_tree(staging)
            disk.make_dir(staging)
        self.barrier()
        try:
            content = write(staging)
        except BaseException as error:
            raise disk.explained(error, staging) from error
        disk.sync_tree(staging)
        self.barrier()
        if self.rank:
            return
        size = disk.size(staging)
        name = f"{kind}/{version:06d}.{self.attempt}"
        disk.remove_tree(self.root / name)
        disk.rename(staging, self.root / name)
        disk.fsync_dir(folder)
        self.published[kind] = Published(name=name, hash=content, bytes=size)

    def measure(self, measure: str, value: float | None = None, text: str | None = None) -> None:
        """Record something that depends on clock or machine; no hash contains it."""
        self.timing.append((measure, value, text))

    def manifest(self) -> Manifest:
        """The manifest of what has been added so far."""
        return Manifest(
            format=FORMAT,
            stage=self.stage,
            step=self.step,
            key=self.key,
            key_parts=self.key_parts,
            attempt=self.attempt,
            tables=self.tables,
            policy=self.published.get(POLICIES),
            checkpoint=self.published.get(CHECKPOINTS),
            notes=self.notes,
            timing=self.timing,
        )

    def commit(self) -> Manifest:
        """Make this attempt the stage's, unless another was first; the winner's manifest."""
        manifest = self.manifest()
        try:
            disk.write_bytes(self.staging / MANIFEST, manifest.to_bytes())
            disk.fsync_dir(self.staging)
            disk.rename(self.staging, self.final)
        except OSError as error:
            return self.yield_to_winner(error)
        disk.fsync_dir(self.final.parent)
        return manifest

    def yield_to_winner(self, error: OSError) -> Manifest:
        """The manifest in place, which decides, not the error that stopped this attempt.

        It may be our own (a rename that failed only as far as we were told), or of an attempt that
        was first and removed our files. Raises the error where there is none.
        """
        winner = read_manifest(self.final)
        if winner is not None and winner.attempt == self.attempt:
            disk.fsync_dir(self.final.parent)
            return winner
        self.discard()
        if winner is not None:
            return winner
        if self.final.exists():
            raise ArtifactError(
                f"{self.final}: in the way of a commit and without a manifest; move it aside"
            ) from error
        raise disk.explained(error, self.final) from error

    def discard(self) -> None:
        """Remove what this attempt made; rank 0 does it for all."""
        if self.rank:
            return
        disk.remove_tree(self.staging)
        for kind in (POLICIES, CHECKPOINTS):
            for made in (self.root / kind).glob(f"*{self.step + 1:06d}.{self.attempt}"):
                disk.remove_tree(made)


def parts_dir(root: Path, step: int, stage: str) -> Path:
    """RUN/steps/000012/.rollout.parts: finished shards of a stage that is not committed yet."""
    return step_dir(root, step) / f".{stage}.parts"


def sweep(root: Path, committed: Manifest) -> None:
    """Remove what the attempts at a committed stage left behind, its shards among it."""
    parts = parts_dir(root, committed.step, committed.stage)
    if parts.exists():
        disk.remove_tree(parts)
    for leftover in step_dir(root, committed.step).glob(f".staging-{committed.stage}-*"):
        disk.remove_tree(leftover)
    if committed.policy is None:
        return
    for kind, kept in ((POLICIES, committed.policy), (CHECKPOINTS, committed.checkpoint)):
        for made in (root / kind).glob(f"*{committed.step + 1:06d}.*"):
            if kept is None or made != root / kept.name:
                disk.remove_tree(made)
