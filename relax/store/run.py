"""A run directory: its settings, its sources, and what is committed in it."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
from pydantic import ValidationError

from relax.config import Config
from relax.errors import ArtifactError, ConfigError, one_line
from relax.schema import TABLES
from relax.store import disk
from relax.store.arrow import content_hash, read_table
from relax.store.commit import CHECKPOINTS, POLICIES, step_dir, sweep
from relax.store.manifest import Manifest, Published, differences, read_manifest

UPDATES = ("update", "sft")  # the stages that publish policies
DECISIVE = ("dynamic_sampling_filter_path",)
"""Sources that decide, by being there, which stages a step has."""


@dataclass(frozen=True)
class Run:
    """A run as it stands on disk. Manifests are read once and remembered: they never change."""

    root: Path
    config: Config
    sources: dict[str, str]
    schedule_steps: int
    first_step: int = 0
    """The steps before it are another run's (`relax fork`): they stand as they are."""
    _manifests: dict[tuple[int, str], Manifest] = field(default_factory=dict, repr=False)

    @classmethod
    def open(cls, root: str | Path) -> Run:
        """The run in `root`; ArtifactError when there is none or its records are damaged."""
        root = Path(root).absolute()
        record, path, accepted = read_records(root)
        try:
            config = Config.model_validate_json(json.dumps(accepted["config"]))
            sources, length = dict(accepted["sources"]), int(record["schedule_steps"])
            return cls(root, config, sources, length, record.get("fork", {}).get("at_step", 0))
        except (ValidationError, KeyError, TypeError) as error:
            raise ArtifactError(
                f"{path}: not the settings of a run of this version: {one_line(error):.200}"
            ) from None

    @classmethod
    def start(cls, config: Config, sources: dict[str, str], about: dict[str, Any]) -> Run:
        """Create the run of `config`, or continue it where it exists.

        `sources` are content hashes of the files it reads; `about` goes into run.json: the command
        and `schedule_steps` at least, the length of the learning-rate decay, frozen with the first
        update. A setting may change as long as nothing that depends on it is committed.
        Raises ConfigError when the directory belongs to a run that would give other results.
        """
        root = Path(config.run.run_dir).absolute()
        if not (root / "run.json").exists():
            _create(root, config, sources, about)
            return cls.open(root)
        run = cls.open(root)
        made = _checked(run, config, sources)
        if made.stages:
            sources = run.sources | sources
        if made.stages.isdisjoint(UPDATES) and about["schedule_steps"] != run.schedule_steps:
            before = read_records(root)[0]
            origin = {name: before[name] for name in ("fork",) if name in before}
            _write_json(root / "run.json", about | origin)
        if (config, sources) != (run.config, run.sources):
            _accept(root, config, sources, about)
        run = cls.open(root)
        run._finish_tidying()
        return run

    @staticmethod
    def check(config: Config, sources: dict[str, str]) -> None:
        """Raise what `start` would, and change nothing."""
        root = Path(config.run.run_dir).absolute()
        if not (root / "run.json").exists():
            _refuse_foreign(root)
        else:
            _checked(Run.open(root), config, sources)

    # --- what is committed -------------------------------------------------------------------

    def stages(self, step: int | None = None) -> Iterator[tuple[int, str, Path]]:
        """Step, name and directory of every stage that is there, by step; of one step if given."""
        of_step = "[0-9]*" if step is None else f"{step:06d}"
        for folder in sorted(self.root.glob(f"steps/{of_step}/[a-z]*")):
            yield int(folder.parent.name), folder.name, folder

    def manifest(self, step: int, stage: str) -> Manifest | None:
        """The committed manifest of a stage, None while there is none."""
        known = self._manifests.get((step, stage))
        folder = step_dir(self.root, step) / stage
        if known is None and disk.listed(folder):
            known = read_manifest(folder)
            if known is not None:
                self._manifests[step, stage] = known
        return known

    def committed(self, step: int, stage: str) -> Manifest:
        """The manifest of a stage that must be there; ArtifactError when it is not."""
        manifest = self.manifest(step, stage)
        if manifest is None:
            raise ArtifactError(f"{step_dir(self.root, step) / stage}: not committed")
        return manifest

    def table(self, step: int, stage: str, name: str) -> pa.Table:
        """A committed table; ArtifactError when its content is not what the manifest says."""
        manifest = self.committed(step, stage)
        path = step_dir(self.root, step) / stage / f"{name}.arrow"
        table = read_table(path, TABLES[name])
        if content_hash(table) != manifest.tables[name].hash:
            raise ArtifactError(
                f"{path}: content differs from its manifest (bit rot or an edit); "
                f"restore it, or remove {path.parent} to compute it again"
            )
        return table

    def published(self, version: int) -> Manifest | None:
        """The manifest that published policy `version` (None for version 0, the given model)."""
        if version == 0:
            return None
        for stage in UPDATES:
            manifest = self.manifest(version - 1, stage)
            if manifest is not None:
                return manifest
        raise ArtifactError(f"{self.root}: policy {version} does not exist; no update published it")

    def policy_dir(self, version: int) -> Path:
        """Directory of policy `version`; ArtifactError when it is gone or not whole."""
        manifest = self.published(version)
        if manifest is None:
            return Path(self.config.model.hf_checkpoint)
        assert manifest.policy is not None
        path = self.root / manifest.policy.name
        size = disk.size(path)
        if size != manifest.policy.bytes:
            raise ArtifactError(
                f"{path}: {size} bytes, its manifest says {manifest.policy.bytes}: "
                "removed by retention or damaged; `relax export` rebuilds it from a checkpoint"
            )
        return path

    def policy_hash(self, version: int) -> str:
        """Content hash of policy `version`."""
        manifest = self.published(version)
        if manifest is None:
            return self.sources["model"]
        assert manifest.policy is not None
        return manifest.policy.hash

    def checkpoints(self, at_most: int) -> Iterator[tuple[int, Path, Published]]:
        """Versions <= `at_most` whose checkpoint is there, newest first; whole or not."""
        for version in range(at_most, 0, -1):
            manifest = self.published(version)
            if manifest is not None and manifest.checkpoint is not None:
                path = self.root / manifest.checkpoint.name
                if path.exists():
                    yield version, path, manifest.checkpoint

    def num_updates(self) -> int:
        """Updates committed so far, counted from step 0 without a gap."""
        step = 0
        while any(self.manifest(step, stage) for stage in UPDATES):
            step += 1
        return step

    # --- housekeeping ------------------------------------------------------------------------

    def tidy(self, winner: Manifest) -> None:
        """After a commit: remove leftovers of its other attempts, old policies and checkpoints."""
        sweep(self.root, winner)
        if winner.policy is None:
            return
        keep, new = self._kept_checkpoints(winner.step + 1), winner.step + 1
        in_use = {new - 1, new, self.config.reference_version(new)}
        for kind, kept in ((CHECKPOINTS, keep), (POLICIES, keep | in_use)):
            for folder in (self.root / kind).glob("[0-9]*"):
                if int(folder.name[:6]) <= winner.step and int(folder.name[:6]) not in kept:
                    disk.remove_tree(folder)

    def _kept_checkpoints(self, newest: int) -> set[int]:
        whole = (
            version
            for version, path, published in self.checkpoints(newest)
            if disk.size(path) == published.bytes
        )
        return set(itertools.islice(whole, self.config.run.max_actor_ckpt_to_keep))

    def _finish_tidying(self) -> None:
        """What a flow that was killed after its last commit did not come to."""
        last = max((step for step, _, _ in self.stages()), default=0)
        for step, name, _ in self.stages(last):
            manifest = self.manifest(step, name)
            if manifest is not None:
                self.tidy(manifest)


def _create(root: Path, config: Config, sources: dict[str, str], about: dict[str, Any]) -> None:
    """Settings first, run.json last: a run without it does not exist."""
    _refuse_foreign(root)
    _accept(root, config, sources, about)
    _write_json(root / "run.json", about)


def _refuse_foreign(root: Path) -> None:
    """A directory that holds something else is left alone."""
    foreign = (
        (p.name for p in root.iterdir() if not p.name.startswith(".")) if root.exists() else ()
    )
    if not {"config", "lease", "jobs"}.issuperset(foreign):
        raise ConfigError(f"run.run_dir = {root}: not empty and not a run; give another --run-dir")


def _accept(root: Path, config: Config, sources: dict[str, str], about: dict[str, Any]) -> None:
    """Record an accepted change of settings as a new numbered file."""
    folder = root / "config"
    disk.make_dir(folder)
    number = len(list(folder.glob("[0-9]*.json"))) + 1 if (root / "run.json").exists() else 1
    record = {
        "config": config.model_dump(mode="json"),
        "sources": sources,
        "command": about["command"],
        "accepted": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }
    _write_json(folder / f"{number:04d}.json", record)


@dataclass(frozen=True)
class MadeFrom:
    """What the committed stages of a run depend on."""

    stages: frozenset[str] = frozenset()
    sections: frozenset[str] = frozenset()
    """Sections of the configuration."""
    sources: frozenset[str] = frozenset()
    """Names of Run.sources, and `policy`."""


def _made_from(run: Run) -> MadeFrom:
    """By the keys of one manifest a kind of stage: those of a kind depend on the same."""
    found: dict[str, Manifest] = {}
    for step, name, _ in run.stages():
        if step >= run.first_step and name not in found:
            manifest = run.manifest(step, name)
            if manifest is not None:
                found[name] = manifest
    parts = [manifest.key_parts for manifest in found.values()]
    return MadeFrom(
        frozenset(found),
        frozenset(name for part in parts for name in part["config"]),
        frozenset(name for part in parts for name in part["sources"]),
    )


def _checked(run: Run, config: Config, sources: dict[str, str]) -> MadeFrom:
    """What the run is made from; ConfigError where settings or sources would not continue it."""
    made = _made_from(run)
    _refuse_lost_reference(run, config)
    if made.stages:
        _refuse_other_run(run, config, sources, made)
    return made


def _refuse_other_run(run: Run, config: Config, sources: dict[str, str], made: MadeFrom) -> None:
    """Only what no committed artifact depends on may differ from what the run was made with."""
    read = made.sources | ({"model"} if "policy" in made.sources else set())
    read |= {n for n in DECISIVE if bool(run.sources.get(n)) != bool(sources.get(n))}
    # Held-out prompts where only one of two calls evaluates are no difference.
    read -= {"eval_prompts"} & (run.sources.keys() ^ sources.keys())
    lines = differences(_keyed(run.config, made.sections), _keyed(config, made.sections))
    lines += [
        f"content of {line}"
        for line in differences(_chosen(run.sources, read), _chosen(sources, read))
    ]
    if lines:
        raise ConfigError(
            f"{run.root}: a run with other settings: {'; '.join(lines)}; "
            "give the settings it was made with, or another --run-dir "
            f"(`relax fork {run.root} NEW --at-step N` makes one that has the steps before N)"
        )


def _keyed(config: Config, names: Collection[str]) -> dict[str, Any]:
    return {name: getattr(config, name).keyed() for name in names}


def _chosen(sources: dict[str, str], names: Collection[str]) -> dict[str, str]:
    return {name: sources[name] for name in names if sources.get(name)}


def _refuse_lost_reference(run: Run, config: Config) -> None:
    """A fork has the reference policy of the run it came from; another interval needs another."""
    version = config.reference_version(run.first_step)
    if run.first_step and version and run.num_updates() == run.first_step:
        try:
            run.policy_dir(version)
        except ArtifactError:
            raise ConfigError(
                f"--ref-update-interval = {config.algorithm.ref_update_interval}: the reference of "
                f"step {run.first_step} would be policy {version}, which this fork has not; give "
                f"one that divides {run.first_step}, or 0"
            ) from None


def read_records(root: Path) -> tuple[dict[str, Any], Path, dict[str, Any]]:
    """run.json, and the file of the newest accepted settings with what it says."""
    record = _read_json(root / "run.json")
    accepted = sorted((root / "config").glob("[0-9]*.json"))
    if not accepted:
        raise ArtifactError(f"{root}/config: empty; run.json says that this is a run")
    return record, accepted[-1], _read_json(accepted[-1])


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        raise ArtifactError(f"{path}: missing; give the directory of a run") from None
    except ValueError as error:
        raise ArtifactError(f"{path}: damaged: {error}") from None


def _write_json(path: Path, value: dict[str, Any]) -> None:
    disk.write_whole(path, (json.dumps(value, indent=1) + "\n").encode())
