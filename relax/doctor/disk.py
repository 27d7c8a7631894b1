"""Files and bytes of a run on disk, from its settings: per step, per evaluation and in all."""

from __future__ import annotations

import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

from relax.algorithms import rules
from relax.config import Config
from relax.data.rows import read_rows
from relax.doctor.memory import dtype_bytes
from relax.doctor.model import ModelSize
from relax.errors import ArtifactError
from relax.sizes import in_bytes
from relax.stages import STAGES, Stage, round_row
from relax.stages.rounds import is_dynamic, prompts_per_round

GIB = 2**30
TEXT_BYTES_PER_TOKEN = 4
LIST_BYTES_PER_TOKEN = 4 + 4 + 1 / 8
"""tokens, rollout_logp and mask of one response token."""
PER_STEP = ("rollout", "reward", "score", "advantage", "update")


def disk_facts(
    config: Config, size: ModelSize | None, warnings: list[str], *, gpu: bool = False
) -> dict[str, Any]:
    """Files and bytes, per step and in all; tables are kept, policies and checkpoints replaced."""
    steps = config.run.num_rollout
    tables, evaluated = table_bytes(config), evaluation_bytes(config)
    total = tables * steps + evaluated * num_evaluations(config)
    facts: dict[str, Any] = {
        "tables": f"at most {in_bytes(tables)} a step, {in_bytes(tables * steps)} in all",
        "files": files_fact(config),
    }
    if count := num_evaluations(config):
        files = files_of(STAGES["evaluate"]) + (config.placement_of("evaluate") == "job")
        facts["evaluations"] = (
            f"{count} of {files} files, {files * count} in all; at most {in_bytes(evaluated)} each"
        )
    if size:
        policy = size.num_published * dtype_bytes(config.update.rollout_dtype, gpu)
        learners = 2 if "critic" in rules.row_of(config).needs else 1
        checkpoint = size.num_parameters * 12 * learners
        keep = config.run.max_actor_ckpt_to_keep
        # What is new is whole before what is old goes.
        kept = (keep + 2) * policy + (keep + 1) * checkpoint
        facts["policy"] = f"{in_bytes(policy)} each, {keep + 2} kept at most"
        facts["checkpoint"] = f"{in_bytes(checkpoint)} each, {keep} kept"
        facts["kept"] = f"{in_bytes(kept)} of policies and checkpoints at any time"
        total += kept
    facts["run"] = f"at most {in_bytes(total)}"
    if config.run.run_dir:
        free = shutil.disk_usage(existing(Path(config.run.run_dir))).free
        facts["free"] = in_bytes(free)
        if free < total + config.run.min_free_gib * GIB:
            warnings.append(
                f"run.run_dir: {in_bytes(free)} free, the run may take {in_bytes(total)} beside "
                f"min_free_gib = {config.run.min_free_gib}, below which it pauses"
            )
    return facts


# --- files ---------------------------------------------------------------------------------------


def files_of(row: Stage) -> int:
    """Files that a committed stage leaves among its step's: its tables and its manifest."""
    return sum(name != "policy" for name in row.writes) + 1


def files_fact(config: Config) -> str:
    """Files of a finished step, those of its jobs included, and of all steps.

    Of rounds of dynamic sampling a step has at least one.
    """
    steps, stages = config.run.num_rollout, step_stages(config)
    files = sum(files_of(STAGES[name]) for name in stages) + num_jobs(config, stages)
    if not is_dynamic(config):
        return f"{files} a step, {files * steps} in all"
    rows = [round_row("rollout.1"), round_row("reward.1")]
    a_round = sum(map(files_of, rows)) + num_jobs(config, ("rollout", "reward"))
    most = config.rollout.dynamic_sampling_max_rounds
    return (
        f"{files} a step and {a_round} a round: {files + a_round} to {files + most * a_round} a "
        f"step, {(files + a_round) * steps} to {(files + most * a_round) * steps} in all"
    )


def step_stages(config: Config) -> tuple[str, ...]:
    """The stages of every step, but for its rounds."""
    return tuple(n for n in PER_STEP if n != "score" or rules.scores_needed(config))


def num_jobs(config: Config, stages: tuple[str, ...]) -> int:
    """Jobs that neighbouring stages make at most, each of which leaves a job.json."""
    count, before = 0, ""
    for name in stages:
        there = config.allocation_of(name) if config.placement_of(name) == "job" else ""
        count += config.placement_of(name) == "job" and (not there or there != before)
        before = there
    return count


def num_evaluations(config: Config) -> int:
    """Evaluations of `relax train`: before the first step, every eval_interval, after the last."""
    if not config.evaluate.eval_prompt_data:
        return 0
    steps, interval = config.run.num_rollout, config.evaluate.eval_interval
    return 2 + ((steps - 1) // interval if interval else 0)


# --- bytes ---------------------------------------------------------------------------------------


def table_bytes(config: Config) -> float:
    """Most bytes that the tables of a step may have, with all rounds of dynamic sampling."""
    r = config.rollout
    scores = 4 * len(rules.scores_needed(config))
    prompts = r.rollout_batch_size
    sampled = prompts_per_round(config) * r.dynamic_sampling_max_rounds if is_dynamic(config) else 0
    lists = LIST_BYTES_PER_TOKEN + TEXT_BYTES_PER_TOKEN
    tokens = r.n_samples_per_prompt * r.rollout_max_response_len
    prompt = config.data.rollout_max_prompt_len * (4 + TEXT_BYTES_PER_TOKEN)
    return (prompts + sampled) * (tokens * lists + prompt) + prompts * tokens * scores


def evaluation_bytes(config: Config) -> float:
    """Most bytes of the answers of an evaluation; 0 where its prompts cannot be counted."""
    settings, count = config.evaluate, 0
    if settings.eval_prompt_data:
        with suppress(ArtifactError, OSError):  # told among the faults
            count = len(read_rows(settings.eval_prompt_data))
    longest = settings.eval_max_response_len or config.rollout.rollout_max_response_len
    row = (config.data.rollout_max_prompt_len + longest) * TEXT_BYTES_PER_TOKEN
    return count * (settings.n_samples_per_eval_prompt + 1) * row


def existing(path: Path) -> Path:
    """The path, or the nearest above it that is there."""
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return path
