"""Verify a step's responses against their labels."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from relax.algorithms import rules
from relax.algorithms.metrics import pass_rates
from relax.config import Config, flag_of
from relax.errors import ArtifactError, FunctionError
from relax.rewards import Verifier, custom, verifier
from relax.schema import REWARDS
from relax.stages.functions import loaded
from relax.stages.metrics import metric_table
from relax.stages.perform import Inputs, Warm
from relax.store import Output, rows

POST_PROCESS = "custom_reward_post_process_path"


def run(config: Config, inputs: Inputs, output: Output, warm: Warm) -> None:
    """Write the table `rewards`; one that is not a finite number is an error naming samples."""
    del warm
    write_rewards(config, inputs, output, sampled_by="rollout")


def write_rewards(config: Config, inputs: Inputs, output: Output, *, sampled_by: str) -> pa.Table:
    """The table `rewards`, written, of what the stage `sampled_by` of the step sampled."""
    response = rows(inputs.run.table(inputs.step, sampled_by, "responses"))
    prompt = rows(inputs.run.table(inputs.step, sampled_by, "prompts"))
    label_of = dict(zip(prompt.group_id.tolist(), prompt.label, strict=True))
    verify = configured_verifier(config, inputs.run.sources)
    start = time.perf_counter()
    reward_B = np.array(
        [
            verified(verify, text, label_of[group], f"sample {place}")
            for place, (text, group) in enumerate(
                zip(response.response, response.group_id.tolist(), strict=True)
            )
        ]
    )
    output.measure("seconds/verify", time.perf_counter() - start)
    check_finite("reward", reward_B, response.sample_id, "the verifier")
    shaped_B = reward_B - overlong_penalty(config, response.response_len)
    processed_B = post_processed(config, inputs.run.sources, shaped_B, response.group_id)
    check_finite("reward", processed_B, response.sample_id, "the post-processing")
    table = REWARDS.table(
        sample_id=response.sample_id,
        group_id=response.group_id,
        raw_reward=reward_B,
        reward=processed_B,
    )
    output.write("rewards", table)
    metrics = reward_metrics(config, table)
    if config.reward.overlong_buffer_len:
        metrics["rollout/overlong_penalty"] = float((reward_B - shaped_B).mean())
    output.write("metrics", metric_table([metrics]))
    return table


def verified(verify: Verifier, text: str, label: str, whose: str) -> float:
    """The reward of one response; FunctionError says whose it was."""
    try:
        return float(verify(text, label))
    except FunctionError as error:
        raise error.at(whose) from None


def reward_metrics(config: Config, rewards: pa.Table) -> dict[str, float]:
    """Means of the rewards, and pass rates."""
    column = rows(rewards)
    size = config.rollout.n_samples_per_prompt
    return {
        "rollout/raw_reward": column.raw_reward.mean(),
        "rollout/rewards": column.reward.mean(),
        **pass_rates(column.raw_reward, column.group_id, size),
    }


def overlong_penalty(config: Config, length_B: np.ndarray) -> np.ndarray:
    """What lengths cost: nothing up to max - buffer, then linear, `factor` at the limit.

    The soft overlong punishment of DAPO (arXiv:2503.14476, eq. 13), in valid tokens.
    """
    buffer = config.reward.overlong_buffer_len
    if not buffer:
        return np.zeros(len(length_B))
    excess_B = length_B - (config.rollout.rollout_max_response_len - buffer)
    return config.reward.overlong_penalty_factor * np.clip(excess_B / buffer, 0.0, 1.0)


def configured_verifier(config: Config, sources: Mapping[str, str]) -> Verifier:
    """The user's own function where one is given, else the named one."""
    own = loaded(config, "custom_rm_path", sources)
    if own is not None:
        return custom(own, config.reward.custom_rm_path)
    return verifier(config.reward.rm_type)


def post_processed(
    config: Config, sources: Mapping[str, str], reward_B: np.ndarray, group_id_B: np.ndarray
) -> np.ndarray:
    """Rewards as advantages see them: through the user's own function where one is given."""
    name, path = POST_PROCESS, rules.value_of(config, POST_PROCESS)
    process = loaded(config, name, sources)
    if process is None:
        return reward_B
    found = process(torch.tensor(reward_B), torch.tensor(group_id_B))
    found_B = np.asarray(found, dtype=np.float64)
    if found_B.shape != reward_B.shape:
        raise ArtifactError(
            f"{flag_of(name)} = {path!r}: gave shape {found_B.shape}; one "
            f"reward for each of {len(reward_B)} responses is needed"
        )
    return found_B


def check_finite(stage: str, reward_B: np.ndarray, name_B: Sequence[Any], origin: str) -> None:
    """Raise ArtifactError naming the samples whose reward is NaN or infinite, and who gave it."""
    bad = np.flatnonzero(~np.isfinite(reward_B))
    if len(bad):
        shown = ", ".join(f"{name_B[i]} ({reward_B[i]})" for i in bad[:5])
        raise ArtifactError(
            f"{stage}: not a finite number for {len(bad)} samples: {shown}; mend {origin}"
        )
