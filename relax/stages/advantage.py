"""Advantages of a step's responses, from their rewards and groups."""

from __future__ import annotations

import numpy as np
import torch

from relax.algorithms import ALGORITHMS, advantages
from relax.config import Config
from relax.errors import ArtifactError
from relax.schema import ADVANTAGES
from relax.stages.metrics import metric_table, zero_std_frac
from relax.stages.perform import Inputs, Warm
from relax.store import Output, rows


def run(config: Config, inputs: Inputs, output: Output, warm: Warm) -> None:
    """Write the table `advantages`: one scalar a response, broadcast over its tokens later."""
    del warm
    reward = rows(inputs.run.table(inputs.step, "reward", "rewards"))
    check_groups(reward.group_id, config.rollout.n_samples_per_prompt)
    settings = config.algorithm
    row = ALGORITHMS[settings.advantage_estimator]
    advantage_B = getattr(advantages, row.advantage)(
        torch.tensor(reward.reward),
        torch.tensor(reward.group_id),
        std_normalization=not settings.disable_grpo_std_normalization,
    ).numpy()
    output.write(
        "advantages",
        ADVANTAGES.table(
            sample_id=reward.sample_id, group_id=reward.group_id, advantage=advantage_B
        ),
    )
    metrics = {
        "rollout/advantages": float(advantage_B.mean(dtype=np.float64)),
        "rollout/zero_std_frac": zero_std_frac(reward.reward, reward.group_id),
    }
    output.write("metrics", metric_table([metrics]))


def check_groups(group_id_B: np.ndarray, size: int) -> None:
    """Raise ArtifactError naming a group that has not `size` samples."""
    groups, counts = np.unique(group_id_B, return_counts=True)
    for group, count in zip(groups, counts, strict=True):
        if count != size:
            raise ArtifactError(
                f"group {group}: {count} samples, n_samples_per_prompt = {size}; "
                "the rollout is not whole"
            )
