"""What keeps a command from starting, before anything is made or started.

`relax train`, `sft`, `evaluate`, their `--dry-run` and `relax check` all ask here.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from relax.config import Config
from relax.doctor.disk import existing
from relax.doctor.hub import resolved
from relax.doctor.rows import check_budget, check_rows
from relax.doctor.settings import checked, vocabulary
from relax.doctor.sources import EVALUATION, fingerprints, other_models
from relax.doctor.weights import check_weights
from relax.errors import ArtifactError, ConfigError
from relax.flags import require
from relax.stages import STAGES
from relax.store import Run

Command = Literal["train", "sft", "evaluate"]
NEEDED: dict[Command, tuple[str, ...]] = {
    "train": ("run_dir", "hf_checkpoint", "prompt_data"),
    "sft": ("run_dir", "hf_checkpoint", "prompt_data"),
    "evaluate": ("run_dir", "hf_checkpoint", "prompt_data", "eval_prompt_data"),
}

READ_BY_EVALUATE = (*STAGES["evaluate"].reads, "model", "placement", "slurm", "wandb")


def settled(config: Config, command: Command) -> Config:
    """The settings with a directory for every model; of `evaluate`, on top of the run's own.

    Raises ConfigError or ArtifactError for a model or a run that is not there.
    """
    return resolved(of_run(config) if command == "evaluate" else config)


def of_run(config: Config) -> Config:
    """The run's own settings, under those given now in the sections that an evaluation reads.

    ArtifactError where there is no run.
    """
    require(config, "run_dir")
    root = Path(config.run.run_dir)
    if not (root / "run.json").exists():
        raise ArtifactError(f"{root}: no such run; give the --run-dir of one")
    own = Run.open(root).config
    merged = {}
    for name in READ_BY_EVALUATE:
        section = getattr(config, name)
        given = {field: getattr(section, field) for field in section.model_fields_set}
        merged[name] = getattr(own, name).model_copy(update=given)
    return own.model_copy(update=merged)


def check(config: Config, command: Command = "train") -> dict[str, str]:
    """Content hashes of what the command reads; raises one error with a line for each fault."""
    sources, found = look(config, command)
    if found:
        kind = next((type(error) for error in found if isinstance(error, ConfigError)), None)
        raise (kind or ArtifactError)("\n".join(map(str, found)))
    return sources


def look(config: Config, command: Command = "train") -> tuple[dict[str, str], list[Exception]]:
    """The hashes as far as they can be made, and every fault that was found."""
    found: list[Exception] = []
    sources: dict[str, str] = {}

    def tried(step: Callable[[], object]) -> bool:
        try:
            step()
        except (ConfigError, ArtifactError) as error:
            if str(error) not in map(str, found):
                found.append(error)
            return False
        return True

    complete = tried(lambda: require(config, *NEEDED[command]))
    tried(lambda: checked(config))
    if command == "train":
        tried(lambda: check_budget(config))
    if config.model.hf_checkpoint:
        readable = tried(lambda: check_models(config)) and tried(lambda: vocabulary(config))
        complete = complete and readable
    for path in filter(None, (config.data.prompt_data, config.evaluate.eval_prompt_data)):
        complete = tried(lambda path=path: check_rows(config, path)) and complete
    if complete:
        tried(lambda: sources.update(source_hashes(config, command)))
    if config.run.run_dir:
        tried(lambda: check_directory(config, sources))
    return sources, found


def source_hashes(config: Config, command: Command) -> dict[str, str]:
    """Hashes of all that the run reads; an evaluation reads less, and the run has the others."""
    if command != "evaluate":
        return fingerprints(config)
    return Run.open(config.run.run_dir).sources | fingerprints(config, EVALUATION)


def check_models(config: Config) -> None:
    """Weights of every model that is given."""
    for directory in (config.model.hf_checkpoint, *other_models(config.model).values()):
        check_weights(Path(directory))


def check_directory(config: Config, sources: dict[str, str]) -> None:
    """Raise where the run cannot be made in its directory, nor continued there."""
    given = config.run.run_dir
    root = Path(given).absolute()
    there = existing(root)
    if not there.is_dir():
        what = "it is a file" if there == root else f"{there} is a file"
        raise ConfigError(f"--run-dir = {given!r}: {what}; give a directory")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ConfigError(f"--run-dir = {given!r}: {there} cannot be written to; give another")
    if sources:
        Run.check(config, sources)
