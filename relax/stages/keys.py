"""The key of a stage: everything its result depends on, and whether it is done under that key."""

from __future__ import annotations

from typing import Any

from relax.algorithms import rules
from relax.errors import ArtifactError
from relax.schema import SCHEMA_VERSION
from relax.stages import Stage, is_round
from relax.stages.rounds import first_draw, round_of, row_of
from relax.store import Manifest, Run
from relax.store.manifest import differences, digest
from relax.store.run import UPDATES


def key_parts(run: Run, step: int, stage: Stage) -> dict[str, Any]:
    """All that the result of `stage` at `step` depends on, by name."""
    parts: dict[str, Any] = {
        "stage": stage.name,
        "code": stage.code,
        "schema": SCHEMA_VERSION,
        "step": step,
        "config": {name: getattr(run.config, name).keyed() for name in stage.reads},
        "inputs": {name: run.committed(step, name).content for name in inputs_of(run, stage)},
        "sources": {name: _source(run, step, name) for name in stage.sources},
    }
    if is_round(stage.name):
        parts["cursor"] = first_draw(run, step, round_of(stage.name))
    if stage.continues and step > 0:
        before = run.committed(step - 1, stage.continues)
        parts["continues"] = {"key": before.key, "content": before.content}
    return parts


def inputs_of(run: Run, stage: Stage) -> list[str]:
    """The stages of the same step that `stage` reads: `score` only where something asks for it."""
    scored = bool(rules.scores_needed(run.config))
    return [name for name in stage.after if name != "score" or scored]


def _source(run: Run, step: int, name: str) -> str:
    if name == "policy":
        return run.policy_hash(step)
    if name == "columns":
        top_k = run.config.algorithm.opd_log_prob_top_k
        asked = [f"top_k_overlap of {top_k}"] if top_k else []
        return " ".join([*sorted(rules.scores_needed(run.config)), *asked])
    if name == "reference" and (version := run.config.reference_version(step)):
        return run.policy_hash(version)
    if name == "schedule":
        return str(run.schedule_steps)
    return run.sources.get(name, "")


def done(run: Run, step: int, name: str) -> Manifest | None:
    """The committed manifest if the stage is done; ArtifactError if it was done differently."""
    for other in UPDATES:
        if name in UPDATES and other != name and run.manifest(step, other) is not None:
            raise ArtifactError(
                f"{run.root}: policy {step + 1} was made by {other}; for {name} give another "
                "--run-dir, and that policy's directory as --hf-checkpoint"
            )
    manifest = run.manifest(step, name)
    if manifest is None:
        return None
    if step < run.first_step:
        return manifest
    parts = key_parts(run, step, row_of(run, step, name))
    if manifest.key != digest(parts):
        changes = "; ".join(differences(manifest.key_parts, parts)) or "its code or schema"
        raise ArtifactError(
            f"{run.root}/steps/{step:06d}/{name}: made from something else than it would be now: "
            f"{changes}; put that back, or start another --run-dir (`relax fork` makes one)"
        )
    return manifest
