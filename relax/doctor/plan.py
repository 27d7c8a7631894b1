"""The plan of a run: facts in sections, made from the configuration and the model's config.json."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from relax.algorithms import rules
from relax.algorithms.table import Algorithm
from relax.config import Config
from relax.data.rows import read_rows
from relax.doctor.disk import disk_facts, num_evaluations, step_stages
from relax.doctor.memory import memory
from relax.doctor.model import model_size
from relax.doctor.settings import gpus_of_rollout, gpus_that_sample, ranks_of, warnings_of
from relax.doctor.start import look, settled
from relax.errors import ArtifactError, ConfigError
from relax.stages import STAGES

Facts = dict[str, Any]


@dataclass(frozen=True)
class Plan:
    """What will run: sections of facts, and what keeps it from starting."""

    sections: dict[str, Facts]
    forbidden: list[str]
    """Settings that the algorithm refuses, wherever it runs."""
    problems: list[str]
    """What is missing on this machine."""
    warnings: list[str]


def plan(config: Config, *, ranks: int | None = None, gpu: bool | None = None) -> Plan:
    """What a run of `config` is made of, on `ranks` trainer ranks with or without GPUs.

    Both are as in the update's allocation where they are not given. Raises ConfigError for an
    algorithm that is not in the table.
    """
    row = rules.row_of(config)
    ranks = ranks_of(config) if ranks is None else ranks
    gpu = has_gpus(config) if gpu is None else gpu
    forbidden, warnings = verdict(config)
    problems = [line for line in faults(config) if line not in forbidden]
    size = None
    if config.model.hf_checkpoint:
        with suppress(ArtifactError):  # told among the faults
            size = model_size(config.model.hf_checkpoint)
    sections = {
        "run": run_facts(config),
        "algorithm": algorithm_facts(config, row),
        "stages": stage_facts(config),
        "batch": batch_facts(config),
        "memory per rank": memory(config, size, ranks=ranks, gpu=gpu) if size else {},
        "disk": disk_facts(config, size, warnings, gpu=gpu),
    }
    found = {name: facts for name, facts in sections.items() if facts}
    return Plan(found, forbidden, problems, warnings)


def has_gpus(config: Config) -> bool:
    """Whether the update's allocation asks for GPUs."""
    name = config.allocation_of("update")
    if config.placement_of("update") == "inline" or not name:
        return False
    return config.slurm.allocations[name].gpus_per_node > 0


def verdict(config: Config) -> tuple[list[str], list[str]]:
    """What the algorithm's rules refuse, and what they warn of."""
    try:
        return [], warnings_of(config)
    except ConfigError as error:
        return str(error).splitlines(), []


def faults(config: Config) -> list[str]:
    """What `relax train` would say instead of starting, a line each."""
    try:
        config = settled(config, "train")
    except ConfigError as error:
        return [str(error)]
    return [line for error in look(config)[1] for line in str(error).splitlines()]


def run_facts(config: Config) -> Facts:
    """What it is and whether it exists already."""
    root = config.run.run_dir
    begun = bool(root) and (Path(root) / "run.json").exists()
    return {
        "directory": f"{root or 'not set'}{' (continues)' if begun else ''}",
        "steps": config.run.num_rollout,
        "model": config.model.hf_checkpoint or "not set",
        "reference": config.model.ref_load or "none",
        "engine": engine_fact(config),
        "reward": config.reward.custom_rm_path or config.reward.rm_type,
    }


def engine_fact(config: Config) -> str:
    """The engine, and how many of the GPUs that its job asks for sample."""
    asked, used = gpus_of_rollout(config), gpus_that_sample(config)
    name = config.rollout.rollout_engine
    if not asked or name == "external":
        return name
    advice = "" if used == asked else "; rollout_num_engines says how many engines there are"
    return f"{name}, {used} of {asked} GPUs of a node sample{advice}"


def algorithm_facts(config: Config, row: Algorithm) -> Facts:
    """The row of the table, what it asks for, and which settings have no place with it."""
    unused = rules.unused(config, row)
    facts = {
        "name": row.name,
        "paper": row.paper,
        "advantage": row.advantage,
        "objective": row.objective,
        "reduction": row.reduction,
        "kl": row.kl,
        "needs": ", ".join(sorted(row.needs)),
        "scores": ", ".join(sorted(rules.scores_needed(config))),
        "uses": ", ".join(sorted(row.uses)),
        "ignores": ", ".join(sorted(unused.keys() - row.refused.keys())),
    }
    facts |= {f"requires {setting}": why for setting, why in row.required.items()}
    facts |= {f"refuses {setting}": why for setting, why in row.refused.items()}
    return {name: value for name, value in facts.items() if value}


def stage_facts(config: Config) -> Facts:
    """Where each stage runs."""
    there = {*step_stages(config), *(["evaluate"] if num_evaluations(config) else [])}
    return {name: config.placement_of(name) for name in STAGES if name in there}


def batch_facts(config: Config) -> Facts:
    """From prompts over responses to optimizer steps and micro-batches."""
    r, u = config.rollout, config.update
    responses, steps = config.responses_per_rollout, config.optimizer_steps
    per_step = responses // steps
    if u.micro_batch_size:
        micro = f"{math.ceil(per_step / u.micro_batch_size)} of {u.micro_batch_size} responses"
    else:
        most = math.ceil(per_step * config.longest_sequence() / u.max_tokens_per_gpu)
        micro = f"at most {most} of {u.max_tokens_per_gpu} tokens"
    facts: Facts = {
        "rollout": f"{r.rollout_batch_size} prompts x {r.n_samples_per_prompt} = {responses} "
        "responses",
        "tokens": f"at most {responses * r.rollout_max_response_len} sampled a rollout",
        "optimizer steps": f"{steps} a rollout, {steps * config.run.num_rollout} in all",
        "optimizer step": f"{per_step // r.n_samples_per_prompt} groups = {per_step} responses",
        "micro-batches": f"{micro} an optimizer step",
    }
    if config.data.prompt_data:
        with suppress(ArtifactError, OSError):  # told among the faults
            count = len(read_rows(config.data.prompt_data))
            drawn = r.rollout_batch_size * config.run.num_rollout
            facts["prompts"] = f"{count} in the source, {drawn / count:.2f} epochs"
    return facts
