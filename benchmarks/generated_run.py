"""A made-up run of any size, committed through the store as a real one is.

Shapes: P prompts of a step, G group members, B = P * G responses, N tokens of the step.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa

from relax.flags import load_config
from relax.schema import ADVANTAGES, EVALS, IDS_PER_STEP, PROMPTS, RESPONSES, REWARDS, SCORES
from relax.stages.metrics import metric_table
from relax.store import Output, Run

SOURCE_SIZE = 7_000
WORDS = np.array(["so", "the", "sum", "is", "then", "add", "half", "=", "4", "12", "\\boxed{3}"])


def generate(
    root: Path, *, num_steps: int, num_groups: int, group_size: int, mean_len: int, seed: int = 0
) -> Run:
    """The run in `root`, of `num_steps` steps of num_groups x group_size responses."""
    config = load_config(
        None,
        {
            "run_dir": str(root),
            "num_rollout": num_steps,
            "rollout_batch_size": num_groups,
            "n_samples_per_prompt": group_size,
            "rollout_max_response_len": 2 * mean_len,
            "min_free_gib": 0.0,
        },
    )
    run = Run.start(config, {"model": "made-up"}, {"schedule_steps": 1, "command": "generated"})
    rng = np.random.default_rng(seed)
    for step in range(num_steps):
        _step(run, step, rng, num_groups=num_groups, size=group_size, mean_len=mean_len)
        if step % 20 == 0:
            _commit(run, step, "evaluate", evals=_evals(step, num_steps, rng))
    return run


def _commit(run: Run, step: int, stage: str, **tables: pa.Table) -> None:
    parts = {"stage": stage, "step": step}
    output = Output(run.root, step, stage, attempt="generated-1", key_parts=parts)
    for name, table in tables.items():
        output.write(name, table)
    output.measure("started", 1.7e9 + 10 * step)
    output.measure("host", text="made-up")
    output.measure("seconds/total", {"rollout": 5.0, "update": 3.0}.get(stage, 0.1))
    output.commit()


def _step(run: Run, step: int, rng, *, num_groups: int, size: int, mean_len: int) -> None:
    total = num_groups * size
    first = step * IDS_PER_STEP
    sample_id, place_B = first + np.arange(total), np.arange(total)
    group_id = first + place_B // size
    len_B = np.clip(rng.lognormal(np.log(mean_len) - 0.125, 0.5, total), 1, 2 * mean_len)
    len_B = len_B.astype(np.int32)
    offsets = np.concatenate([[0], np.cumsum(len_B)]).astype(np.int32)
    num_tokens = int(offsets[-1])
    logp_N = -rng.exponential(0.4, num_tokens).astype(np.float32)
    old_N = logp_N + rng.normal(0, 0.01, num_tokens).astype(np.float32)
    logp_sum_B = np.add.reduceat(logp_N.astype(np.float64), offsets[:-1])
    drift_B = np.add.reduceat(np.abs(old_N - logp_N).astype(np.float64), offsets[:-1]) / len_B
    prompt_P = (step * num_groups + np.arange(num_groups)) % SOURCE_SIZE
    skill_P = (prompt_P * 2654435761 % 1000) / 1000
    chance_B = np.clip(np.repeat(skill_P, size) * (0.5 + step / 100), 0, 0.97)
    reward_B = (rng.random(total) < chance_B).astype(np.float64)
    truncated_B = len_B >= 2 * mean_len
    by_group = reward_B.reshape(num_groups, size)
    spread = by_group.std(1, ddof=1, keepdims=True)
    advantage_B = ((by_group - by_group.mean(1, keepdims=True)) / (spread + 1e-6)).reshape(-1)
    responses = RESPONSES.table(
        sample_id=sample_id,
        group_id=group_id,
        sample_index=place_B % size,
        policy_version=np.full(total, step),
        seed=rng.integers(0, 2**62, total),
        response=[" ".join(rng.choice(WORDS, 24)) for _ in range(total)],
        tokens=_lists(rng.integers(0, 151_936, num_tokens, dtype=np.int32), offsets),
        mask=_lists(np.ones(num_tokens, bool), offsets),
        rollout_logp=_lists(logp_N, offsets),
        response_len=len_B,
        rollout_logp_sum=logp_sum_B,
        finish_reason=np.where(truncated_B, "length", "stop"),
        truncated=truncated_B,
        num_turns=np.ones(total, np.int32),
        full_support=np.ones(total, bool),
    )
    length = metric_table([{"rollout/response_len/mean": float(len_B.mean())}])
    prompts = _prompts(first, prompt_P, step, num_groups)
    _commit(run, step, "rollout", prompts=prompts, responses=responses, metrics=length)
    rewards = REWARDS.table(
        sample_id=sample_id, group_id=group_id, raw_reward=reward_B, reward=reward_B
    )
    scores = SCORES.table(sample_id=sample_id, old_logp=_lists(old_N, offsets))
    advantages = ADVANTAGES.table(
        sample_id=sample_id, group_id=group_id, advantage=advantage_B.astype(np.float32)
    )
    _commit_rest(run, step, rewards, scores, advantages, drift=float(drift_B.mean()))


def _commit_rest(
    run: Run, step: int, rewards: pa.Table, scores: pa.Table, advantages: pa.Table, *, drift: float
) -> None:
    mean = float(np.mean(rewards.column("raw_reward").to_numpy()))
    metrics = metric_table([{"rollout/raw_reward": mean}])
    _commit(run, step, "reward", rewards=rewards, metrics=metrics)
    _commit(run, step, "score", scores=scores)
    _commit(run, step, "advantage", advantages=advantages)
    train = {
        "train/loss": 0.01,
        "train/grad_norm": 1.0,
        "train/pg_clipfrac": 0.02 + 1e-4 * step,
        "train/pg_clipfrac_pos": 0.01,
        "train/pg_clipfrac_neg": 0.01 + 1e-4 * step,
        "train/train_rollout_logprob_abs_diff": drift,
    }
    _commit(run, step, "update", metrics=metric_table([train, train]))


def _prompts(first: int, prompt_P: np.ndarray, step: int, num_groups: int) -> pa.Table:
    texts = [f"What is {p} + {p % 97}? Answer with just the number." for p in prompt_P]
    drawn = step * num_groups + np.arange(num_groups)
    return PROMPTS.table(
        group_id=first + np.arange(num_groups),
        prompt_id=prompt_P,
        epoch=drawn // SOURCE_SIZE,
        position=drawn % SOURCE_SIZE,
        cursor=drawn,
        prompt=texts,
        prompt_tokens=[[1, 2, 3]] * num_groups,
        prompt_len=[3] * num_groups,
        label=[str(p + p % 97) for p in prompt_P],
    )


def _evals(step: int, num_steps: int, rng) -> pa.Table:
    count = 50
    return EVALS.table(
        eval_name=["held_out"] * count,
        decoding=["sampled"] * count,
        policy_version=[step] * count,
        prompt_id=range(count),
        sample_index=[0] * count,
        prompt=["1+1="] * count,
        response=["2"] * count,
        label=["2"] * count,
        reward=(rng.random(count) < 0.2 + 0.5 * step / num_steps).astype(float),
        response_len=[2] * count,
        finish_reason=["stop"] * count,
    )


def _lists(values_N: np.ndarray, offsets: np.ndarray) -> pa.Array:
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values_N))
