"""Dynamic sampling: rounds are scored and filtered; a step is put together from what passed.

Shapes: B responses, G groups.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from relax.config import Config
from relax.errors import ArtifactError
from relax.schema import CANDIDATES, GROUP
from relax.stages import reward as reward_stage
from relax.stages.filters import Filter
from relax.stages.functions import loaded
from relax.stages.metrics import metric_table
from relax.stages.perform import Inputs, Warm
from relax.stages.rollout import rollout_metrics
from relax.stages.rounds import KEPT, num_rounds, round_of
from relax.store import Output, Run, rows

TOO_HARD, TOO_EASY, MIXED = "too hard", "too easy", "mixed"


def reward_round(config: Config, inputs: Inputs, output: Output, warm: Warm) -> None:
    """Score a round: the tables `rewards` and `candidates`, the filter's word on each group."""
    del warm
    number = round_of(output.stage)
    sampled_by = f"rollout.{number}"
    rewards = rows(reward_stage.write_rewards(config, inputs, output, sampled_by=sampled_by))
    prompts = rows(inputs.run.table(inputs.step, sampled_by, "prompts"))
    responses = rows(inputs.run.table(inputs.step, sampled_by, "responses"))
    name = config.rollout.dynamic_sampling_filter_path
    keep = loaded(config, "dynamic_sampling_filter_path", inputs.run.sources)
    assert keep is not None
    reasons = why_not(keep, name, prompts.group_id, rewards, responses)
    reward_of = {g: rewards.reward[rewards.group_id == g] for g in prompts.group_id}
    reward_G = [reward_of[g] for g in prompts.group_id]
    table = CANDIDATES.table(
        group_id=prompts.group_id,
        round=[number] * len(reasons),
        prompt_id=prompts.prompt_id,
        epoch=prompts.epoch,
        cursor=prompts.cursor,
        reward_mean=[r.mean() for r in reward_G],
        reward_min=[r.min() for r in reward_G],
        reward_max=[r.max() for r in reward_G],
        passed=[not reason for reason in reasons],
        reason=reasons,
    )
    output.write("candidates", table)
    output.notes[KEPT] = sum(not reason for reason in reasons)


def why_not(
    keep: Filter,
    name: str,
    group_id_G: np.ndarray,
    rewards: SimpleNamespace,
    responses: SimpleNamespace,
) -> list[str]:
    """For each group "" where it passes, else which filter stopped it and what the group is."""
    reasons = []
    for group_id in group_id_G:
        places = np.flatnonzero(rewards.group_id == group_id)
        group = {
            "reward": rewards.reward[places].tolist(),
            "raw_reward": rewards.raw_reward[places].tolist(),
            "response_len": responses.response_len[places].tolist(),
            "truncated": responses.truncated[places].tolist(),
            "response": [responses.response[i] for i in places],
        }
        reasons.append("" if keep(group) else f"{name}: {difficulty(group['raw_reward'])}")
    return reasons


def difficulty(raw_reward: list[float]) -> str:
    """Whether all responses of a group passed (a reward of at least 1), none, or some."""
    if min(raw_reward) >= 1:
        return TOO_EASY
    return TOO_HARD if max(raw_reward) < 1 else MIXED


def rollout(config: Config, inputs: Inputs, output: Output, warm: Warm) -> None:
    """Write `prompts` and `responses` of the first groups that passed, as many as a step takes."""
    del warm
    run, step = inputs.run, inputs.step
    numbers = range(1, num_rounds(run, step) + 1)
    candidates = pa.concat_tables([run.table(step, f"reward.{n}", "candidates") for n in numbers])
    chosen = enough(config, step, candidates)
    responses = of_groups(run, step, "rollout", "responses", chosen)
    output.write("prompts", of_groups(run, step, "rollout", "prompts", chosen))
    output.write("responses", responses)
    metrics = rollout_metrics(responses) | {"rollout/policy_version": step}
    output.write("metrics", metric_table([metrics | selection_metrics(candidates, len(chosen))]))


def reward(config: Config, inputs: Inputs, output: Output, warm: Warm) -> None:
    """Write the rewards of the groups that the step is made of."""
    del warm
    run, step = inputs.run, inputs.step
    prompts = run.table(step, "rollout", "prompts")
    rewards = of_groups(run, step, "reward", "rewards", prompts.column(GROUP.name).to_pylist())
    output.write("rewards", rewards)
    output.write("metrics", metric_table([reward_stage.reward_metrics(config, rewards)]))


def enough(config: Config, step: int, candidates: pa.Table) -> list[int]:
    """Groups of a step; ArtifactError that says why there are not enough."""
    column, wanted = rows(candidates), config.rollout.rollout_batch_size
    passed = column.group_id[column.passed].tolist()
    if len(passed) >= wanted:
        return passed[:wanted]
    counts = {w: sum(r.endswith(w) for r in column.reason) for w in (TOO_EASY, TOO_HARD, MIXED)}
    easy, hard = counts[TOO_EASY], counts[TOO_HARD]
    advice = "harder" if easy > hard else "easier"
    raise ArtifactError(
        f"rollout: step {step}: {len(passed)} of {wanted} groups passed "
        f"{config.rollout.dynamic_sampling_filter_path} in {max(column.round)} rounds of "
        f"{len(column.round)} groups: {easy} too easy (all passed), {hard} too hard (none), "
        f"{counts[MIXED]} otherwise; raise dynamic_sampling_max_rounds = "
        f"{config.rollout.dynamic_sampling_max_rounds}, or start another run with {advice} prompts "
        "or a larger over_sampling_batch_size; what is sampled is kept"
    )


def of_groups(run: Run, step: int, stage: str, name: str, groups: list[int]) -> pa.Table:
    """The rows of some groups, out of the tables `name` of all rounds of `stage`."""
    parts = [run.table(step, f"{stage}.{n}", name) for n in range(1, num_rounds(run, step) + 1)]
    whole = pa.concat_tables(parts)
    is_in = pc.is_in(whole.column(GROUP.name), value_set=pa.array(groups, GROUP.type))  # pyright: ignore[reportAttributeAccessIssue]
    return whole.filter(is_in).combine_chunks()


def selection_metrics(candidates: pa.Table, wanted: int) -> dict[str, float]:
    """How much was sampled for what is trained on, and why the rest was not."""
    column = rows(candidates)
    count = len(column.passed)
    return {
        "rollout/dynamic/rounds": float(column.round.max()),
        "rollout/dynamic/groups_sampled": float(count),
        "rollout/dynamic/passed_frac": float(column.passed.mean()),
        "rollout/dynamic/too_easy_frac": sum(r.endswith(TOO_EASY) for r in column.reason) / count,
        "rollout/dynamic/too_hard_frac": sum(r.endswith(TOO_HARD) for r in column.reason) / count,
        "rollout/dynamic/surplus_groups": float(column.passed.sum() - wanted),
    }
