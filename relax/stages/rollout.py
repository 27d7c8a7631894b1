"""Sample a group of responses to each prompt of a step."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path

import numpy as np

from relax.algorithms.metrics import length_metrics, repetition_frac
from relax.config import Config, DataSection, RolloutSection
from relax.data.order import Draw, draw
from relax.data.prompts import Prompt, PromptSource, load_prompts, load_tokenizer
from relax.data.seeds import response_seed
from relax.engines import open_engine
from relax.engines.protocol import Engine, Request, Response, SamplingParams
from relax.errors import ArtifactError
from relax.schema import IDS_PER_STEP, PROMPTS, RESPONSES
from relax.stages.metrics import metric_table
from relax.stages.perform import Inputs, Warm
from relax.store import Output, Run
from relax.trainer.publish import policy_hash


def run(config: Config, inputs: Inputs, output: Output, warm: Warm) -> None:
    """Write the tables `prompts` and `responses` of the step."""
    step, size = inputs.step, config.rollout.n_samples_per_prompt
    start = time.perf_counter()
    engine = engine_for(config.rollout.rollout_engine, inputs.run, step, warm)
    tokenizer = load_tokenizer(inputs.run.config.model.hf_checkpoint)
    source = prompts_for(
        config.data, config.data.prompt_data, inputs.run.sources["prompts"], tokenizer, warm
    )
    output.measure("seconds/load", time.perf_counter() - start)

    count = config.rollout.rollout_batch_size
    draws = draw(
        len(source.prompts),
        start=step * count,
        count=count,
        seed=config.seeds.rollout_seed,
        shuffle=config.data.rollout_shuffle,
    )
    prompts = [source.prompts[d.prompt_id] for d in draws]
    requests = seeded_requests(prompts, size, config.seeds.rollout_seed, step)
    start = time.perf_counter()
    responses = sample(
        engine,
        requests,
        sampling_params(config.rollout),
        config.rollout.rollout_shard_groups * size,
    )
    seconds = time.perf_counter() - start
    output.measure("seconds/sample", seconds)
    output.measure("tokens/s", sum(len(r.tokens) for r in responses) / seconds)

    output.write("prompts", prompt_table(step, prompts, draws))
    texts = tokenizer.batch_decode([r.tokens for r in responses], skip_special_tokens=True)
    output.write("responses", response_table(step, size, requests, responses, texts))
    metrics = length_metrics(
        [len(r.tokens) for r in responses], [r.finish_reason == "length" for r in responses]
    )
    metrics |= {
        "rollout/repetition_frac": repetition_frac(texts),
        "rollout/dropped_prompts": source.dropped,
        "rollout/policy_version": step,
        "rollout/staleness": 0,
    }
    output.write("metrics", metric_table([metrics]))


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


def sampling_params(settings: RolloutSection) -> SamplingParams:
    """What the engine is asked for in a training rollout."""
    return SamplingParams(
        temperature=settings.rollout_temperature,
        top_p=settings.rollout_top_p,
        top_k=settings.rollout_top_k,
        max_response_len=settings.rollout_max_response_len,
        min_tokens=settings.rollout_min_tokens,
        stop=settings.rollout_stop,
        stop_token_ids=settings.rollout_stop_token_ids,
        ignore_eos=settings.rollout_ignore_eos,
        max_context_len=settings.rollout_max_context_len,
    )


def sample(
    engine: Engine, requests: list[Request], params: SamplingParams, shard: int
) -> list[Response]:
    """Responses in the order of requests, sampled in fixed shards of `shard` requests."""
    shards = [requests[i : i + shard] for i in range(0, len(requests), shard)]
    return [response for part in shards for response in engine.sample(part, params)]


def engine_for(name: str, run: Run, version: int, warm: Warm) -> Engine:
    """An engine holding policy `version`; a warm one that holds another is given its weights."""
    wanted = run.policy_hash(version)
    if warm.engine is None:
        warm.engine = open_engine(name)
    if warm.engine_at != wanted:
        warm.engine_at = ""
        warm.engine.load(checked_policy(run, version))
        warm.engine_at = wanted
    return warm.engine


def checked_policy(run: Run, version: int) -> Path:
    """Directory of a policy whose weights are those its manifest names; ArtifactError otherwise."""
    path = run.policy_dir(version)
    if version > 0 and policy_hash(path) != run.policy_hash(version):
        raise ArtifactError(f"{path}: weights differ from the manifest that published them")
    return path


def prompts_for(
    settings: DataSection, path: str, expected: str, tokenizer, warm: Warm
) -> PromptSource:
    """The prompts of `path`, read once a process; ArtifactError when they are not as `expected`."""
    if path not in warm.prompts:
        source = load_prompts(
            path,
            tokenizer,
            input_key=settings.input_key,
            label_key=settings.label_key,
            apply_chat_template=settings.apply_chat_template,
            max_prompt_len=settings.rollout_max_prompt_len,
            overlong=settings.overlong_prompt,
            prompt_template=settings.prompt_template or None,
        )
        if source.content_hash != expected:
            raise ArtifactError(f"{path}: changed since the run began; put the old file back")
        warm.prompts[path] = source
    return warm.prompts[path]


def prompt_table(step: int, prompts: list[Prompt], draws: list[Draw]):
    """One row a group."""
    return PROMPTS.table(
        group_id=[step * IDS_PER_STEP + i for i in range(len(prompts))],
        prompt_id=[p.prompt_id for p in prompts],
        epoch=[d.epoch for d in draws],
        position=[d.position for d in draws],
        prompt=[p.text for p in prompts],
        prompt_tokens=[p.tokens for p in prompts],
        prompt_len=[len(p.tokens) for p in prompts],
        label=[p.label for p in prompts],
    )


def response_table(
    step: int, size: int, requests: list[Request], responses: list[Response], texts: list[str]
):
    """One row a response, group after group."""
    places = range(len(responses))
    return RESPONSES.table(
        sample_id=[step * IDS_PER_STEP + i for i in places],
        group_id=[step * IDS_PER_STEP + i // size for i in places],
        sample_index=[i % size for i in places],
        policy_version=[step for _ in places],
        seed=[r.seed for r in requests],
        response=texts,
        tokens=[r.tokens for r in responses],
        mask=[[True] * len(r.tokens) for r in responses],
        rollout_logp=[r.logp for r in responses],
        response_len=[len(r.tokens) for r in responses],
        rollout_logp_sum=[float(np.sum(r.logp, dtype=np.float64)) for r in responses],
        finish_reason=[r.finish_reason for r in responses],
        truncated=[r.finish_reason == "length" for r in responses],
    )
