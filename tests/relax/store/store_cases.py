"""Runs and attempts made by hand, without models: what the tests of the store work on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from relax.flags import load_config
from relax.schema import METRICS
from relax.store import Manifest, Output, Run
from relax.store.commit import CHECKPOINTS, POLICIES

SOURCES = {"model": "m", "tokenizer": "t", "prompts": "p"}


def about(schedule_steps: int = 10) -> dict[str, Any]:
    return {"command": "relax train", "schedule_steps": schedule_steps}


def config_of(root: Path, **settings: Any):
    return load_config(None, {"run_dir": str(root), "hf_checkpoint": "base", **settings})


def start(root: Path, sources=SOURCES, schedule_steps: int = 10, **settings: Any) -> Run:
    return Run.start(config_of(root, **settings), dict(sources), about(schedule_steps))


def metrics(value: float):
    return METRICS.table(optimizer_step=[0], metric=["m"], value=[value])


READ = {
    "rollout": (("run", "seeds", "data", "rollout"), ("policy", "tokenizer", "prompts")),
    "reward": (("rollout", "reward"), ("custom_rm_path",)),
    "score": (("rollout", "update"), ("model", "reference")),
    "update": (("rollout", "algorithm", "update"), ("model", "schedule")),
    "evaluate": (("rollout", "evaluate"), ("policy", "eval_prompts")),
}
"""Of each stage: the sections and the sources that its key names."""


def key_parts(stage: str) -> dict[str, Any]:
    sections, sources = READ.get(stage, ((), ()))
    return {"stage": stage, "config": dict.fromkeys(sections), "sources": dict.fromkeys(sources)}


def attempt(root: Path, name: str, *, step: int = 0, stage: str = "rollout", value: float = 0.0):
    """An attempt that has written one table."""
    output = Output(root, step, stage, attempt=name, key_parts=key_parts(stage))
    output.write("metrics", metrics(value))
    return output


def write_text(text: str):
    """What `publish` calls: one file, and a hash that says what is in it."""

    def write(directory: Path) -> str:
        (directory / "weights").write_text(text)
        return f"hash of {text}"

    return write


def update(root: Path, step: int, name: str = "a", *, checkpoint: bool = True) -> Manifest:
    """A committed update with a policy and, if wanted, a checkpoint."""
    output = attempt(root, name, step=step, stage="update", value=step)
    output.publish(POLICIES, step + 1, write_text(f"policy {step + 1}"))
    if checkpoint:
        output.publish(CHECKPOINTS, step + 1, write_text(f"checkpoint {step + 1}"))
    return output.commit()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []
