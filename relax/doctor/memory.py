"""Memory of one rank, estimated from the shape of the model: what is held, and what passes through.

The estimate is for the trainer's own way to compute: float32 master weights, gradients and Adam's
two moments, sharded over the ranks of a replica; of a micro-batch, the activations and the tiles
of logits; of the model, what is gathered whole to compute with.
"""

from __future__ import annotations

from typing import Any

from relax.algorithms import rules
from relax.config import Config
from relax.doctor.model import ModelSize, model_size
from relax.errors import ArtifactError
from relax.sizes import in_bytes
from relax.trainer.tile import logit_tile

ACTIVATIONS_PER_LAYER = 34
"""Bytes kept for the backward pass for each token, layer and hidden unit, at 2 bytes a number
(arXiv:2205.05198, eq. 2, without the quadratic term: fused attention does not keep it)."""


def memory(config: Config, size: ModelSize, *, ranks: int, gpu: bool) -> dict[str, Any]:
    """Name -> text, in GiB: training, the copy that samples, and their caches."""
    update = config.update
    weights, shards = size.num_parameters, max(1, ranks // update.num_replicas)
    held = {name: weights * n / shards for name, n in HELD.items()}
    passing = passing_bytes(config, size, ranks=ranks, gpu=gpu)
    width = dtype_bytes(update.rollout_dtype, gpu)
    shard = min(config.rollout.rollout_shard_groups, config.rollout.rollout_batch_size)
    in_flight = shard * config.rollout.n_samples_per_prompt
    longest = config.longest_sequence(size.context_len)
    cache = in_flight * longest * size.cache_values_per_token * width
    counted = "counted" if size.counted else "estimated"
    facts = {
        "model": f"{size.architecture}, {weights / 1e6:,.1f} M parameters ({counted})",
        "ranks": f"{ranks}, {'GPU' if gpu else 'CPU'}"
        + (f", in {update.num_replicas} replicas" if update.num_replicas > 1 else ""),
    }
    if update.offload == "cpu" and gpu:
        facts |= {"training": _sum(passing), "offloaded": f"{_sum(held)}, in host memory"}
    else:
        facts["training"] = _sum(held | passing)
    facts["sampling"] = (
        f"{in_bytes(weights * width + cache)}: weights {in_bytes(weights * width)}, "
        f"key-value cache of {in_flight} responses at most {in_bytes(cache)}"
    )
    if "critic" in rules.row_of(config).needs:
        facts["critic"] = f"as much again: {in_bytes(sum(held.values()))} held"
    wanted = rules.scores_needed(config)
    for column, name, path in (
        ("ref_logp", "reference", config.model.ref_load),
        ("teacher_logp", "teacher", config.model.opd_teacher_load),
    ):
        if column in wanted:
            facts[name] = f"{in_bytes(_weights(path, weights) * 4 / shards)} while it scores"
    return facts


HELD = {"weights": 4, "gradients": 4, "optimizer": 8}
"""Bytes a parameter, of which each shard of a replica has its part."""


def passing_bytes(config: Config, size: ModelSize, *, ranks: int, gpu: bool) -> dict[str, float]:
    """What a micro-batch needs for a while, on each rank.

    gathered: embedding, head and two blocks as they compute, and the head's float32 gradient.
    logits: a tile of them in float32, another of what is made of it, and the copy that computes.
    """
    width = dtype_bytes(config.update.update_dtype, gpu)
    tokens = micro_batch_tokens(config, size, ranks)
    every, layers = config.update.recompute_every, size.num_layers
    recomputed = -(-layers // every) if every else 0
    # While a block is computed again, its own activations are there like those of a kept one.
    kept = layers - recomputed + bool(recomputed)
    per_token = (kept * ACTIVATIONS_PER_LAYER // 2 + recomputed) * size.hidden_size * width
    rows, words = logit_tile(tokens, size.vocab_size, "cuda" if gpu else "cpu")
    whole = size.num_outside_blocks + 2 * size.num_per_block
    return {
        "gathered": whole * width + size.num_embedded * 4,
        "activations": tokens * per_token,
        "logits": rows * words * (8 if width == 4 else 8 + width),
    }


def micro_batch_tokens(config: Config, size: ModelSize, ranks: int) -> int:
    """Most tokens of a micro-batch: a budget, or a number of the longest; never all of a step's."""
    update, longest = config.update, config.longest_sequence(size.context_len)
    per_step = config.responses_per_rollout // config.optimizer_steps
    share = -(-per_step // ranks) * longest
    if update.micro_batch_size:
        return min(update.micro_batch_size * longest, share)
    return min(max(update.max_tokens_per_gpu, longest), share)


def dtype_bytes(setting: str, gpu: bool) -> int:
    """Bytes a number; `auto` is bfloat16 on GPUs and float32 elsewhere."""
    return 2 if setting == "bfloat16" or (setting == "auto" and gpu) else 4


def _sum(parts: dict[str, float]) -> str:
    told = ", ".join(f"{name} {in_bytes(part)}" for name, part in parts.items())
    return f"{in_bytes(sum(parts.values()))}: {told}"


def _weights(path: str, otherwise: int) -> int:
    """Parameters of the model in `path`; those of the trained one where it is not here."""
    try:
        return model_size(path).num_parameters
    except ArtifactError:
        return otherwise
