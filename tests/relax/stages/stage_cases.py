"""Tiny models, and runs whose rollout is made by hand: ragged, with holes, empty and truncated."""

from __future__ import annotations

import contextlib
import io
import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from relax.config import Config
from relax.data.tasks import build_model
from relax.flags import load_config
from relax.schema import IDS_PER_STEP, PROMPTS, RESPONSES, REWARDS
from relax.stages import STAGES
from relax.stages.keys import key_parts
from relax.stages.metrics import metric_table
from relax.stages.perform import Warm, perform
from relax.store import Output, Run, rows

SIZES = dict(
    hidden_size=32, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=16, intermediate_size=48
)
VOCABULARY = 64
ATTEMPTS = itertools.count()


def write_policy(directory: Path, *, seed: int) -> Path:
    """A random model whose distributions are far from uniform, and far from another seed's."""
    build_model(directory, **SIZES, seed=seed)
    weights = load_file(directory / "model.safetensors")
    sharp = {name: w * (8 if w.ndim == 2 else 1) for name, w in weights.items()}
    save_file(sharp, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def write_critic(policy: Path, directory: Path) -> Path:
    """The policy's decoder under a value head that is not zero."""
    directory.mkdir()
    for file in policy.iterdir():
        (directory / file.name).write_bytes(file.read_bytes())
    weights = load_file(policy / "model.safetensors")
    generator = torch.Generator().manual_seed(7)
    weights["score.weight"] = torch.randn(1, SIZES["hidden_size"], generator=generator) * 0.1
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def settings_of(models: Path, task, run_dir: Path, **changed: Any) -> dict[str, Any]:
    """Overrides of a small run; names of models ("reference") become their directories."""
    places = ("ref_load", "opd_teacher_load", "critic_load")
    named = {n: str(models / v) if n in places else v for n, v in changed.items()}
    return {
        "run_dir": str(run_dir),
        "hf_checkpoint": str(models / "policy"),
        "prompt_data": str(task.train),
        "rollout_batch_size": 4,
        "n_samples_per_prompt": 4,
        "rollout_max_response_len": 6,
        "num_rollout": 2,
        "save_interval": 0,
        "min_free_gib": 0,
        "lr": 1e-3,
        **named,
    }


def started(settings: dict[str, Any]) -> Run:
    """The run of these settings, as `relax train` would start it."""
    from flows.opening import about
    from relax.doctor.start import check

    config = load_config(None, settings)
    with contextlib.redirect_stderr(io.StringIO()):
        sources = check(config)
    return Run.start(config, sources, about(config.run.num_rollout * config.optimizer_steps))


def train(settings: dict[str, Any]) -> Run:
    """The whole flow `train` without Prefect; what it prints is thrown away."""
    from flows import train as flow
    from tasks.stage import perform as perform_task

    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        flow.run(load_config(None, settings), perform_task)
    return Run.open(settings["run_dir"])


def do(run: Run, step: int, stages: Iterable[str], warm: Warm | None = None) -> Warm:
    """Perform stages one after another in one process."""
    warm = warm or Warm()
    for stage in stages:
        perform(str(run.root), step, stage, f"attempt{next(ATTEMPTS)}", warm)
    return warm


def metrics_of(run: Run, step: int, stage: str = "update") -> list[dict[str, float]]:
    """The stage's metrics, one mapping per optimizer step."""
    table = rows(run.table(step, stage, "metrics"))
    found: dict[int, dict[str, float]] = {}
    for number, metric, value in zip(
        table.optimizer_step.tolist(), table.metric, table.value, strict=True
    ):
        found.setdefault(number, {})[metric] = float(value)
    return [found[number] for number in sorted(found)]


def all_metrics(run: Run, step: int) -> dict[str, float]:
    """Every metric of a step, the last optimizer step's where there are several."""
    found: dict[str, float] = {}
    for stage in STAGES:
        if run.manifest(step, stage) is not None:
            for part in metrics_of(run, step, stage):
                found |= part
    return found


# --- a rollout made by hand ---------------------------------------------------------------------


def ragged_lengths(count: int, limit: int, rng: np.random.Generator) -> list[int]:
    """Response lengths: an empty one, two of one token, the rest up to the limit."""
    return [0, 1, 1, limit, *rng.integers(2, limit + 1, count - 4).tolist()]


def holed_mask(length: int, place: int, rng: np.random.Generator) -> np.ndarray:
    """A mask: every third response has holes, the sixth counts nowhere."""
    mask_T = np.ones(length, bool)
    if place % 3 == 2:
        mask_T[rng.random(length) < 0.4] = False
    if place == 5:
        mask_T[:] = False
    return mask_T


def commit(run: Run, step: int, stage: str, tables: dict[str, Any]) -> None:
    """Commit a stage with these tables, under the key that it has in this run."""
    parts = key_parts(run, step, STAGES[stage])
    output = Output(run.root, step, stage, attempt="by-hand", key_parts=parts)
    for name, table in tables.items():
        output.write(name, table)
    output.commit()


def made_rollout(run: Run, step: int, rng: np.random.Generator, *, kept: int | None = None) -> None:
    """Commit `rollout` and `reward` of a step: ragged responses, an engine that is another model.

    rollout_logp is far from what the trainer computes, so that no correction is idle. `kept`: only
    so many of the responses are there.
    """
    config, base = run.config, step * IDS_PER_STEP
    num_groups, size = config.rollout.rollout_batch_size, config.rollout.n_samples_per_prompt
    count, limit = num_groups * size, config.rollout.rollout_max_response_len
    length_B = ragged_lengths(count, limit, rng)
    mask_B = [holed_mask(length, place, rng) for place, length in enumerate(length_B)]
    groups = [base + g for g in range(num_groups)]
    prompts = [rng.integers(3, VOCABULARY, 4).tolist() for _ in groups]
    responses = RESPONSES.table(
        sample_id=[base + i for i in range(count)],
        group_id=[groups[i // size] for i in range(count)],
        sample_index=[i % size for i in range(count)],
        policy_version=[step] * count,
        seed=list(range(count)),
        response=["x" * length for length in length_B],
        tokens=[rng.integers(3, VOCABULARY, length).tolist() for length in length_B],
        mask=[mask_T.tolist() for mask_T in mask_B],
        rollout_logp=[rng.normal(-4.0, 1.0, length) for length in length_B],
        response_len=[int(mask_T.sum()) for mask_T in mask_B],
        rollout_logp_sum=[0.0] * count,
        finish_reason=["length" if length == limit else "stop" for length in length_B],
        truncated=[length == limit for length in length_B],
        num_turns=[1] * count,
        full_support=[True] * count,
    )
    asked = PROMPTS.table(
        group_id=groups,
        prompt_id=list(range(num_groups)),
        epoch=[0] * num_groups,
        position=list(range(num_groups)),
        cursor=list(range(num_groups)),
        prompt=["?"] * num_groups,
        prompt_tokens=prompts,
        prompt_len=[4] * num_groups,
        label=["1"] * num_groups,
    )
    responses = responses.slice(0, kept)
    tables = {"responses": responses, "prompts": asked, "metrics": metric_table([])}
    commit(run, step, "rollout", tables)
    reward_B = rng.choice([0.0, 1.0, 0.3], count)[:kept]
    rewards = REWARDS.table(
        sample_id=responses["sample_id"].to_numpy(),
        group_id=responses["group_id"].to_numpy(),
        raw_reward=reward_B,
        reward=reward_B,
    )
    commit(run, step, "reward", {"rewards": rewards, "metrics": metric_table([])})


def stages_after_reward(config: Config) -> list[str]:
    """What is left to do in a step whose rewards are known."""
    from relax.algorithms import rules

    return [*(["score"] if rules.scores_needed(config) else []), "advantage", "update"]
