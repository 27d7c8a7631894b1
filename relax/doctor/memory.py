"""Memory of one rank, estimated from the shape of the model: what is held, and what passes through.

The estimate is for the trainer's own way to compute: float32 master weights, gradients and Adam's
two moments, sharded over ranks; activations of one micro-batch; log-probabilities in chunks.
"""

from __future__ import annotations

from typing import Any

from relax.algorithms import rules
from relax.config import Config
from relax.doctor.model import ModelSize, model_size
from relax.errors import ArtifactError
from relax.sizes import in_bytes

LOGPROB_CHUNK = 256
"""Tokens whose logits exist at once."""
ACTIVATIONS_PER_LAYER = 34
"""Bytes kept for the backward pass for each token, layer and hidden unit, at 2 bytes a number
(arXiv:2205.05198, eq. 2, without the quadratic term: fused attention does not keep it)."""


def memory(config: Config, size: ModelSize, *, ranks: int, gpu: bool) -> dict[str, Any]:
    """Name -> text, in GiB: training, the copy that samples, and their caches."""
    width = 2 if gpu else 4
    weights = size.num_parameters
    tokens = config.update.max_tokens_per_gpu
    activations = tokens * size.num_layers * size.hidden_size * ACTIVATIONS_PER_LAYER * width // 2
    logits = LOGPROB_CHUNK * size.vocab_size * 4 * 2
    longest = config.data.rollout_max_prompt_len + config.rollout.rollout_max_response_len
    if size.context_len:
        longest = min(longest, size.context_len)
    shard = min(config.rollout.rollout_shard_groups, config.rollout.rollout_batch_size)
    in_flight = shard * config.rollout.n_samples_per_prompt
    cache = in_flight * longest * size.cache_values_per_token * width
    trainer = {
        "weights": weights * 4 / ranks,
        "gradients": weights * 4 / ranks,
        "optimizer": weights * 8 / ranks,
        "activations": activations,
        "logits": logits,
    }
    counted = "counted" if size.counted else "estimated"
    facts = {
        "model": f"{size.architecture}, {weights / 1e6:,.1f} M parameters ({counted})",
        "ranks": f"{ranks}, {'GPU' if gpu else 'CPU'}",
        "training": f"{in_bytes(sum(trainer.values()))}: "
        + ", ".join(f"{name} {in_bytes(part)}" for name, part in trainer.items()),
        "sampling": f"{in_bytes(weights * width + cache)}: weights {in_bytes(weights * width)}, "
        f"key-value cache of {in_flight} responses at most {in_bytes(cache)}",
    }
    if "critic" in rules.row_of(config).needs:
        facts["critic"] = f"as much again: {in_bytes(weights * 16 / ranks)} held"
    wanted = rules.scores_needed(config)
    for column, name, path in (
        ("ref_logp", "reference", config.model.ref_load),
        ("teacher_logp", "teacher", config.model.opd_teacher_load),
    ):
        if column in wanted:
            facts[name] = f"{in_bytes(_weights(path, weights) * width / ranks)} while it scores"
    return facts


def _weights(path: str, otherwise: int) -> int:
    """Parameters of the model in `path`; those of the trained one where it is not here."""
    try:
        return model_size(path).num_parameters
    except ArtifactError:
        return otherwise
