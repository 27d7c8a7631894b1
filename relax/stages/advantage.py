"""Advantages of a step's responses, from their rewards, groups and scores."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from relax.algorithms import rules
from relax.algorithms.metrics import advantage_metrics
from relax.algorithms.table import Algorithm
from relax.algorithms.whole_rollout import Advantages, complete_groups, compute
from relax.config import AlgorithmSection, Config, flag_of
from relax.errors import ArtifactError, FunctionError
from relax.schema import ADVANTAGES
from relax.stages.columns import counted_masks, padded, score_lists
from relax.stages.functions import loaded
from relax.stages.metrics import metric_table
from relax.stages.perform import Inputs, Warm
from relax.store import Output, rows

ADVANTAGE = "custom_advantage_path"
ALL_TRUNCATED = (
    "every response is truncated and left out by mask_truncated: nothing is learned from them; "
    "raise rollout_max_response_len"
)


def run(config: Config, inputs: Inputs, output: Output, warm: Warm) -> None:
    """Write the table `advantages`: a scalar a response, and per token where tokens differ."""
    del warm
    settings, row = config.algorithm, rules.row_of(config)
    reward = rows(inputs.run.table(inputs.step, "reward", "rewards"))
    response = rows(inputs.run.table(inputs.step, "rollout", "responses"))
    kept_B = kept(reward.group_id, config.rollout.n_samples_per_prompt, settings)
    batch = columns(reward, response, score_lists(inputs.run, inputs.step), settings, kept_B)
    if settings.mask_truncated and not batch["mask_BT"].any():
        print(f"warning: step {inputs.step}: {ALL_TRUNCATED}", file=sys.stderr)
    found = computed(row, batch, config, loaded(config, ADVANTAGE, inputs.run.sources))
    length_B = np.array([len(tokens) for tokens in response.tokens])[kept_B]
    ids = {"sample_id": reward.sample_id[kept_B], "group_id": reward.group_id[kept_B]}
    output.write("advantages", advantage_table(found, batch["mask_BT"], length_B, ids))
    metrics = advantage_metrics(
        row,
        found,
        batch["mask_BT"],
        batch["reward_B"],
        batch["group_id_B"],
        group_size=config.rollout.n_samples_per_prompt,
        response_len_B=torch.tensor(length_B),
        settings=settings.model_dump(),
    )
    output.write("metrics", metric_table([metrics]))


def computed(
    row: Algorithm, batch: dict[str, Tensor], config: Config, custom: Callable | None
) -> Advantages:
    """compute; what the user's own function gave wrong is told under its setting."""
    try:
        return compute(row, batch, config.algorithm.model_dump(), custom)
    except ValueError as error:
        if custom is None or type(error) is not ValueError:
            raise
        path = rules.value_of(config, ADVANTAGE)
        raise FunctionError(f"{flag_of(ADVANTAGE)} = {path!r}: {error}") from None


def columns(
    reward: SimpleNamespace,
    response: SimpleNamespace,
    scores: dict[str, list[np.ndarray]],
    settings: AlgorithmSection,
    kept_B: np.ndarray,
) -> dict[str, Tensor]:
    """The tensors that advantages are made of, of the responses kept; scores have a row each."""
    places = np.flatnonzero(kept_B)
    lists = {"mask": counted_masks(response, settings), "rollout_logp": response.rollout_logp}
    padded_BT = {
        f"{name}_BT": padded([values[i] for i in places])
        for name, values in (lists | scores).items()
    }
    return {
        "reward_B": torch.tensor(reward.reward[kept_B]),
        "group_id_B": torch.tensor(reward.group_id[kept_B]),
        **padded_BT,
    }


def kept(group_id_B: np.ndarray, size: int, settings: AlgorithmSection) -> np.ndarray:
    """Which responses go on: all, or those of whole groups with `drop_incomplete_groups`.

    Raises ArtifactError naming a group that has not `size` samples, and when none is whole.
    """
    whole_B = complete_groups(torch.tensor(group_id_B), size).numpy()
    if whole_B.all():
        return whole_B
    if settings.drop_incomplete_groups and whole_B.any():
        return whole_B
    group = group_id_B[~whole_B][0]
    raise ArtifactError(
        f"group {group}: {(group_id_B == group).sum()} samples, n_samples_per_prompt = {size}; "
        "the rollout is not whole; --drop-incomplete-groups goes on without such groups"
    )


def advantage_table(found: Advantages, mask_BT: Tensor, length_B: np.ndarray, ids: dict[str, Any]):
    """One row a response; lists per token only where tokens of a response may differ."""
    advantage_BT = found.advantage_BT.numpy()
    total_B = advantage_BT.sum(1, dtype=np.float64)
    lists = {} if found.per_response else {"token_advantage": advantage_BT}
    if found.return_BT is not None:
        lists["token_return"] = found.return_BT.numpy()
    return ADVANTAGES.table(
        **ids,
        advantage=(total_B / (mask_BT != 0).sum(1).clamp(min=1).numpy()).astype(np.float32),
        **{
            name: [row[:length] for row, length in zip(values_BT, length_B, strict=True)]
            for name, values_BT in lists.items()
        },
    )
