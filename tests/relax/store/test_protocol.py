"""The order of disk operations on which recovery rests, and proof that the checker would object.

A power cut keeps what was forced to the disk and loses any part of the rest; hence the rules.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from store_cases import attempt, metrics, start, update, write_text

from relax.errors import ArtifactError
from relax.store import Output, Run, disk
from relax.store import run as run_module
from relax.store.arrow import write_table
from relax.store.commit import CHECKPOINTS, POLICIES
from relax.store.manifest import MANIFEST

Done = tuple[str, str, str]
"""An operation that has returned: (operation, path, target of a rename or "")."""


@dataclass
class Ledger:
    """What is on the disk for certain, operation after operation."""

    root: Path
    forced: set[str] = field(default_factory=set)
    entries: set[str] = field(default_factory=set)
    faults: list[str] = field(default_factory=list)
    unsettled: list[str] = field(default_factory=list)

    def check(self, operation: str, path: str, target: str) -> None:
        if operation == "written" and path.endswith(MANIFEST):
            self._published_before(path)
        elif operation == "fsync_file":
            self.forced.add(path)
        elif operation == "rename":
            self._renamed(path, target)
        elif operation == "remove_tree" and self.unsettled and not staged(path):
            self.faults.append(f"{path} removed before {self.unsettled[0]} was durable")

    def _renamed(self, path: str, target: str) -> None:
        files = [str(f) for f in Path(self.root, target).rglob("*") if f.is_file()]
        for file in files:
            before = str(Path(path, os.path.relpath(file, Path(self.root, target))))
            if before not in self.forced:
                self.faults.append(f"{before} renamed before it was forced to the disk")
        if path not in self.forced:
            self.faults.append(f"{path} renamed before its entries were forced to the disk")
        if not self._chain(str(Path(target).parent)):
            self.faults.append(f"{target}: a directory above it is not durable")
        self.unsettled.append(target)

    def _chain(self, folder: str) -> bool:
        """Every directory from the run down to `folder` is an entry that was forced."""
        parts = Path(folder).parts
        return all(str(Path(*parts[:i]).parent) in self.forced for i in range(1, len(parts) + 1))

    def _published_before(self, manifest: str) -> None:
        for name in self.unsettled:
            self.faults.append(f"{manifest} written before {name} was durable")
        text = Path(self.root, manifest).read_text()
        self.entries |= {n for n in self._made() if f'"{n}"' in text}
        for name in self._made() - self.entries:
            self.faults.append(f"{manifest} does not name {name}")

    def _made(self) -> set[str]:
        kinds = (POLICIES, CHECKPOINTS)
        found = (path for kind in kinds for path in (self.root / kind).glob("[0-9]*"))
        return {str(path.relative_to(self.root)) for path in found}

    def settle(self, path: str) -> None:
        self.unsettled = [name for name in self.unsettled if str(Path(name).parent) != path]


def staged(path: str) -> bool:
    return ".staging-" in path


@pytest.fixture
def ledger(tmp_path, monkeypatch) -> Ledger:
    """Watches relax.store.disk from here on."""
    book = Ledger(tmp_path)

    def watch(name: str, operation: Callable) -> Callable:
        def watched(path: Path, *rest):
            result = operation(path, *rest)
            where = os.path.relpath(path, tmp_path)
            target = os.path.relpath(rest[0], tmp_path) if name == "rename" else ""
            book.check(name, where, target)
            if name == "fsync_file":
                book.settle(where)
            return result

        return watched

    for name in ("fsync_file", "rename", "remove_tree"):
        monkeypatch.setattr(disk, name, watch(name, getattr(disk, name)))
    whole = disk.write_file

    def write_file(path: Path, write: Callable[[Path], None]) -> None:
        def noted(path: Path) -> None:
            write(path)
            book.check("written", os.path.relpath(path, tmp_path), "")

        whole(path, noted)

    monkeypatch.setattr(disk, "write_file", write_file)
    return book


def test_a_commit_follows_the_protocol(tmp_path, ledger):
    for stage in ("rollout", "reward", "advantage"):
        attempt(tmp_path, "a", stage=stage).commit()
    update(tmp_path, 0)
    assert ledger.faults == []
    assert ledger.unsettled == []


def test_a_run_with_retention_follows_the_protocol(tmp_path, ledger):
    run = start(tmp_path, max_actor_ckpt_to_keep=1)
    for step in range(3):
        ledger.entries |= ledger._made()
        run.tidy(update(tmp_path, step))
    assert ledger.faults == []
    assert ledger.unsettled == []


# --- mutations: each breaks one rule, and the checker has to say so ------------------------------


def test_renaming_a_table_before_fsync_is_seen(tmp_path, ledger, monkeypatch):
    monkeypatch.setattr(disk, "write_file", lambda path, write: write(path))
    attempt(tmp_path, "a").commit()
    staging = "steps/000000/.staging-rollout-a"
    assert ledger.faults == [
        f"{staging}/{name} renamed before it was forced to the disk"
        for name in sorted(("metrics.arrow", MANIFEST), key=listed(tmp_path))
    ]


def listed(root: Path) -> Callable[[str], int]:
    order = [path.name for path in (root / "steps/000000/rollout").rglob("*")]
    return order.index


def test_renaming_a_stage_before_its_directory_is_forced_is_seen(tmp_path, ledger, monkeypatch):
    output = attempt(tmp_path, "a")
    monkeypatch.setattr(disk, "fsync_dir", lambda path: None)
    output.commit()
    staging = "steps/000000/.staging-rollout-a"
    assert ledger.faults == [f"{staging} renamed before its entries were forced to the disk"]
    assert ledger.unsettled == ["steps/000000/rollout"], "and its own entry was never forced"


def test_publishing_without_sync_is_seen(tmp_path, ledger, monkeypatch):
    output = attempt(tmp_path, "a", stage="update")
    monkeypatch.setattr(disk, "sync_tree", lambda directory: None)
    output.publish(POLICIES, 1, write_text("policy"))
    staging = "policies/.staging-000001.a"
    assert ledger.faults == [
        f"{staging}/weights renamed before it was forced to the disk",
        f"{staging} renamed before its entries were forced to the disk",
    ]


def test_a_new_directory_that_is_not_durable_is_seen(tmp_path, ledger, monkeypatch):
    monkeypatch.setattr(disk, "make_dir", lambda path: path.mkdir(parents=True, exist_ok=True))
    attempt(tmp_path, "a").commit()
    assert ledger.faults == ["steps/000000/rollout: a directory above it is not durable"]


def test_publishing_the_policy_after_the_manifest_is_seen(tmp_path, ledger, monkeypatch):
    """The order update, manifest, policy: a crash between leaves a policy that is not there."""
    late = []
    publish = Output.publish
    monkeypatch.setattr(Output, "publish", lambda self, *rest: late.append((self, rest)))
    output = attempt(tmp_path, "a", stage="update")
    output.publish(POLICIES, 1, write_text("policy"))
    output.commit()
    for self, rest in late:
        publish(self, *rest)
    attempt(tmp_path, "a", step=1).commit()
    assert ledger.faults == [
        "steps/000001/.staging-rollout-a/manifest.json does not name policies/000001.a"
    ]


def test_a_manifest_before_its_policy_is_durable_is_seen(tmp_path, ledger, monkeypatch):
    output = attempt(tmp_path, "a", stage="update")
    with monkeypatch.context() as patched:
        patched.setattr(disk, "fsync_dir", lambda path: None)
        output.publish(POLICIES, 1, write_text("policy"))
    output.commit()
    said = "steps/000000/.staging-update-a/manifest.json written before policies/000001.a"
    assert f"{said} was durable" in ledger.faults


def test_removing_an_old_checkpoint_before_the_commit_is_durable_is_seen(
    tmp_path, ledger, monkeypatch
):
    run = start(tmp_path, max_actor_ckpt_to_keep=1)
    run.tidy(update(tmp_path, 0))
    ledger.entries |= ledger._made()
    with monkeypatch.context() as patched:
        patched.setattr(disk, "fsync_dir", lambda path: None)
        run.tidy(update(tmp_path, 1))
    assert "checkpoints/000001.a removed before policies/000002.a was durable" in ledger.faults


def test_a_reader_that_ignores_hashes_is_fooled_and_ours_is_not(tmp_path, monkeypatch):
    start(tmp_path)
    attempt(tmp_path, "a", value=1.0).commit()
    write_table(tmp_path / "steps/000000/rollout/metrics.arrow", metrics(2.0))
    with pytest.raises(ArtifactError, match="content differs from its manifest"):
        Run.open(tmp_path).table(0, "rollout", "metrics")
    recorded = Run.open(tmp_path).committed(0, "rollout").tables["metrics"].hash
    monkeypatch.setattr(run_module, "content_hash", lambda table: recorded)
    assert Run.open(tmp_path).table(0, "rollout", "metrics").equals(metrics(2.0))
