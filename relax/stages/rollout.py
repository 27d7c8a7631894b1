"""Sample a group of responses to each prompt of a step, or of a round of dynamic sampling."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from relax.algorithms.metrics import length_metrics, repetition_frac
from relax.config import Config, RolloutSection
from relax.data.order import Draw, draw
from relax.data.prompts import Prompt, PromptSource, load_tokenizer
from relax.data.seeds import response_seed
from relax.engines import Request, SamplingParams
from relax.engines.conversation import Sampled
from relax.errors import ArtifactError
from relax.schema import IDS_PER_STEP, PROMPTS, RESPONSES
from relax.stages.engines import Shard, engines_for, sampling_params
from relax.stages.functions import named
from relax.stages.metrics import metric_table
from relax.stages.perform import Inputs, Unfinished, Warm
from relax.stages.prompts import prompts_for
from relax.stages.rounds import first_draw, prompts_per_round, round_of
from relax.stages.sampling import Watch, sampled
from relax.store import Output, Run, rows
from relax.store.parts import Parts


@dataclass(frozen=True)
class Groups:
    """What is asked: prompts with their places, and `size` requests for each, group after group.

    `first` is the place of the first group in its step.
    """

    step: int
    first: int
    size: int
    prompts: list[Prompt]
    draws: list[Draw]
    cursor: int
    requests: list[Request]

    def __post_init__(self) -> None:
        if (self.first + len(self.prompts)) * self.size > IDS_PER_STEP:
            raise ArtifactError(
                f"rollout: step {self.step}: more than {IDS_PER_STEP} responses; lower "
                "rollout_batch_size, n_samples_per_prompt or dynamic_sampling_max_rounds"
            )


def run(config: Config, inputs: Inputs, output: Output, warm: Warm) -> None:
    """Write the tables `prompts` and `responses` of the step, or of the round of it."""
    run, step = inputs.run, inputs.step
    start = time.perf_counter()
    tokenizer = load_tokenizer(config.model.hf_checkpoint)
    source = prompts_for(run, "prompts", tokenizer, warm)
    groups = groups_of(config, run, step, round_of(output.stage), source)
    output.measure("seconds/prompts", time.perf_counter() - start)

    responses = sample_groups(inputs, output, warm, groups, tokenizer)
    output.write("prompts", prompt_table(groups))
    output.write("responses", responses)
    output.notes["prompt stream"] = {
        "start": groups.cursor,
        "end": groups.cursor + len(groups.prompts),
        "prompts in an epoch": len(source.prompts),
        "shuffle": config.data.rollout_shuffle,
        "seed": config.seeds.rollout_seed,
    }
    more = {"rollout/dropped_prompts": source.dropped, "rollout/policy_version": step}
    output.write("metrics", metric_table([rollout_metrics(responses) | more]))


def groups_of(config: Config, run: Run, step: int, number: int, source: PromptSource) -> Groups:
    """The groups of a rollout (round 0), or of a round of dynamic sampling (from 1)."""
    of_step, start = first_draw(run, step, min(number, 1)), first_draw(run, step, number)
    skipped, size = start - of_step, config.rollout.n_samples_per_prompt
    draws = draw(
        len(source.prompts),
        start=of_step,
        count=skipped + prompts_per_round(config),
        seed=config.seeds.rollout_seed,
        shuffle=config.data.rollout_shuffle,
    )
    prompts = [source.prompts[d.prompt_id] for d in draws]
    # Those of earlier rounds as well: a prompt that comes again gets other seeds.
    requests = seeded_requests(prompts, size, config.seeds.rollout_seed, step)
    return Groups(
        step, skipped, size, prompts[skipped:], draws[skipped:], start, requests[skipped * size :]
    )


def sample_groups(
    inputs: Inputs, output: Output, warm: Warm, groups: Groups, tokenizer: Any
) -> pa.Table:
    """The table `responses`: finished shards are read, the others sampled and kept one by one.

    Raises Unfinished when shards are left, to others or as this attempt was asked to stop.
    """
    config = inputs.run.config
    most = config.rollout.rollout_shard_groups * groups.size
    shards = cut(groups.requests, most, sampling_params(config.rollout), inputs.run)
    parts = Parts(output, "responses")
    tables = finished_shards(parts, shards)
    mine = range(len(shards)) if inputs.shards is None else inputs.shards
    missing = [s for s in shards if s.number not in tables and s.number in mine]
    if missing:
        load_engines(inputs, output, warm)
    reused = sum(table.num_rows for table in tables.values())
    watch = Watch(f"{output.stage} {groups.step}", len(groups.requests), reused)
    where, ids = f"{output.stage}: step {groups.step}", [p.prompt_id for p in groups.prompts]
    for number, responses in sampled(warm, missing, where=where, prompt_ids=ids, size=groups.size):
        shard = shards[number]
        watch.add(shard, responses)
        tables[number] = response_table(groups, shard, responses, config.rollout, tokenizer)
        if len(shards) > 1:
            parts.commit(number, tables[number])
            if inputs.stop():
                break
    watch.measure(output)
    # Those of others, finished meanwhile.
    tables |= finished_shards(parts, [s for s in shards if s.number not in tables])
    if len(tables) < len(shards):
        raise Unfinished
    return pa.concat_tables([tables[s.number] for s in shards]).combine_chunks()


def finished_shards(parts: Parts, shards: Sequence[Shard]) -> dict[int, pa.Table]:
    """Number -> table of those of `shards` that were kept."""
    found = {shard.number: parts.read(shard.number) for shard in shards}
    return {number: table for number, table in found.items() if table is not None}


def load_engines(inputs: Inputs, output: Output, warm: Warm) -> None:
    """Engines with the policy of the step, and how long that took."""
    start = time.perf_counter()
    engines_for(inputs.run, inputs.step, warm)
    output.measure("seconds/load", time.perf_counter() - start)


def cut(requests: list[Request], most: int, params: SamplingParams, run: Run) -> list[Shard]:
    """Shards of `most` requests, sampled as the run has it."""
    generate = named(run.config, "custom_generate_function_path", run.sources)
    return [
        Shard(
            i // most,
            i,
            tuple(requests[i : i + most]),
            params,
            generate,
            run.config.model.hf_checkpoint,
        )
        for i in range(0, len(requests), most)
    ]


def rollout_metrics(responses: pa.Table) -> dict[str, float]:
    """Lengths, truncation, repetition, and whether the sampled distribution was the whole one."""
    column = rows(responses)
    return {
        **length_metrics(column.response_len, column.truncated),
        "rollout/repetition_frac": repetition_frac(column.response),
        "rollout/empty_frac": float(np.mean(column.response_len == 0)),
        "rollout/num_turns": float(np.mean(column.num_turns)),
        "rollout/full_support": float(np.mean(column.full_support)),
        "rollout/staleness": 0,
    }


def seeded_requests(prompts: list[Prompt], size: int, seed: int, step: int) -> list[Request]:
    """`size` requests a prompt, each with a seed of its own, also where a prompt comes twice."""
    seen: Counter[int] = Counter()
    requests = []
    for prompt in prompts:
        for _ in range(size):
            place = seen[prompt.prompt_id]
            requests.append(
                Request(prompt.tokens, response_seed(seed, step, prompt.prompt_id, place))
            )
            seen[prompt.prompt_id] += 1
    return requests


def prompt_table(groups: Groups) -> pa.Table:
    """One row a group."""
    prompts, count = groups.prompts, len(groups.prompts)
    first = groups.step * IDS_PER_STEP + groups.first
    return PROMPTS.table(
        group_id=range(first, first + count),
        prompt_id=[p.prompt_id for p in prompts],
        epoch=[d.epoch for d in groups.draws],
        position=[d.position for d in groups.draws],
        cursor=range(groups.cursor, groups.cursor + count),
        prompt=[p.text for p in prompts],
        prompt_tokens=[p.tokens for p in prompts],
        prompt_len=[len(p.tokens) for p in prompts],
        label=[p.label for p in prompts],
    )


def response_table(
    groups: Groups,
    shard: Shard,
    responses: Sequence[Sampled],
    settings: RolloutSection,
    tokenizer: Any,
) -> pa.Table:
    """One row a response of a shard, group after group."""
    count, size, first = len(responses), groups.size, groups.step * IDS_PER_STEP
    places = range(groups.first * size + shard.first, groups.first * size + shard.first + count)
    texts = tokenizer.batch_decode(
        [r.tokens for r in responses], skip_special_tokens=settings.rollout_skip_special_tokens
    )
    return RESPONSES.table(
        sample_id=[first + i for i in places],
        group_id=[first + i // size for i in places],
        sample_index=[i % size for i in places],
        policy_version=[groups.step] * count,
        seed=[r.seed for r in shard.requests],
        response=texts,
        tokens=[r.tokens for r in responses],
        mask=[r.mask for r in responses],
        rollout_logp=[r.logp for r in responses],
        response_len=[sum(r.mask) for r in responses],
        rollout_logp_sum=[float(np.sum(r.logp, dtype=np.float64)) for r in responses],
        finish_reason=[r.finish_reason for r in responses],
        truncated=[r.finish_reason == "length" for r in responses],
        num_turns=[r.num_turns for r in responses],
        full_support=[not shard.params.is_cut] * count,
    )
