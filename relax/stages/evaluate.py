"""Answer held-out prompts with a policy, sampled and greedily, and verify the answers."""

from __future__ import annotations

import numpy as np

from relax.config import Config
from relax.data.prompts import Prompt, load_tokenizer
from relax.engines import Request, SamplingParams
from relax.engines.conversation import Sampled
from relax.schema import EVALS
from relax.stages.engines import engines_for
from relax.stages.metrics import metric_table
from relax.stages.perform import Inputs, Warm
from relax.stages.prompts import prompts_for
from relax.stages.reward import check_finite, configured_verifier, verified
from relax.stages.rollout import cut, seeded_requests
from relax.stages.sampling import sampled
from relax.store import Output

EVAL_SEED_STEP = -1
"""Every evaluation draws the same seeds, so that two policies meet the same luck."""


def run(config: Config, inputs: Inputs, output: Output, warm: Warm) -> None:
    """Write the table `evals`: the answers of policy `step` to every held-out prompt."""
    tokenizer = load_tokenizer(config.model.hf_checkpoint)
    prompts = list(prompts_for(inputs.run, "eval_prompts", tokenizer, warm).prompts)
    engines_for(inputs.run, inputs.step, warm)
    verify = configured_verifier(config, inputs.run.sources)
    answers, names = [], []
    for decoding, temperature, size in decodings(config):
        asked = [(p, i) for p in prompts for i in range(size)]
        requests = seeded_requests(prompts, size, config.seeds.rollout_seed, EVAL_SEED_STEP)
        where = f"evaluate: step {inputs.step}, {decoding}"
        params = eval_params(config, temperature)
        ids = [p.prompt_id for p, _ in asked]
        responses = answer(inputs, warm, requests, params, where=where, prompt_ids=ids)
        texts = tokenizer.batch_decode([r.tokens for r in responses], skip_special_tokens=True)
        for (p, i), response, text in zip(asked, responses, texts, strict=True):
            whose = f"{decoding} answer {i} to prompt {p.prompt_id}"
            reward = verified(verify, text, p.label, whose)
            answers.append((decoding, p, i, response, text, reward))
            names.append(whose)
    check_finite("evaluate", np.array([a[5] for a in answers]), names, "the verifier")
    name = config.evaluate.eval_name
    output.write("evals", eval_table(name, inputs.step, answers))
    output.write("metrics", metric_table([accuracy(name, answers)]))


def answer(
    inputs: Inputs,
    warm: Warm,
    requests: list[Request],
    params: SamplingParams,
    *,
    where: str,
    prompt_ids: list[int],
) -> list[Sampled]:
    """One answer a request, in their order, sampled in shards as rollouts are."""
    settings = inputs.run.config.rollout
    size = settings.rollout_shard_groups * settings.n_samples_per_prompt
    shards = cut(requests, size, params, inputs.run)
    done = dict(sampled(warm, shards, where=where, prompt_ids=prompt_ids, size=1))
    return [response for shard in shards for response in done[shard.number]]


def decodings(config: Config) -> list[tuple[str, float, int]]:
    """(name, temperature, answers per prompt) of each way to answer."""
    settings = config.evaluate
    return [
        ("sampled", settings.eval_temperature, settings.n_samples_per_eval_prompt),
        ("greedy", 0.0, 1),
    ]


def eval_params(config: Config, temperature: float) -> SamplingParams:
    """As in training, but for temperature and length, and from the whole distribution."""
    return SamplingParams(
        temperature=temperature,
        max_response_len=(
            config.evaluate.eval_max_response_len or config.rollout.rollout_max_response_len
        ),
        stop=config.rollout.rollout_stop,
        stop_token_ids=config.rollout.rollout_stop_token_ids,
        max_context_len=config.rollout.rollout_max_context_len,
    )


Answer = tuple[str, Prompt, int, Sampled, str, float]


def eval_table(name: str, version: int, answers: list[Answer]):
    """One row an answer."""
    decoding, prompt, index, response, text, reward = zip(*answers, strict=True)
    return EVALS.table(
        eval_name=[name] * len(answers),
        decoding=decoding,
        policy_version=[version] * len(answers),
        prompt_id=[p.prompt_id for p in prompt],
        sample_index=index,
        prompt=[p.text for p in prompt],
        response=text,
        label=[p.label for p in prompt],
        reward=reward,
        response_len=[sum(r.mask) for r in response],
        finish_reason=[r.finish_reason for r in response],
    )


def accuracy(name: str, answers: list[Answer]) -> dict[str, float]:
    """eval/NAME/DECODING/reward_mean, response_len_mean and truncated_ratio."""
    metrics = {}
    for decoding in dict.fromkeys(a[0] for a in answers):
        chosen = [a for a in answers if a[0] == decoding]
        prefix = f"eval/{name}/{decoding}"
        metrics[f"{prefix}/reward_mean"] = np.mean([a[5] for a in chosen])
        metrics[f"{prefix}/response_len_mean"] = np.mean([sum(a[3].mask) for a in chosen])
        metrics[f"{prefix}/truncated_ratio"] = np.mean(
            [a[3].finish_reason == "length" for a in chosen]
        )
    return metrics
