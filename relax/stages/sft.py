"""Supervised optimizer steps on prompts and their labels, through the same trainer."""

from __future__ import annotations

import numpy as np

from relax.algorithms.masking import valid
from relax.algorithms.reduce import token_mean_weights
from relax.config import Config
from relax.data.order import draw
from relax.data.prompts import Prompt, load_tokenizer
from relax.stages.metrics import metric_table
from relax.stages.perform import Inputs, Warm
from relax.stages.prompts import prompts_for
from relax.stages.training import (
    Learners,
    Metrics,
    inspection_dir,
    train_and_publish,
    trainer_options,
)
from relax.store import Output
from relax.trainer.sequences import LossParts, StepLoss, TrainSequence


def run(config: Config, inputs: Inputs, output: Output, warm: Warm) -> None:
    """Write the table `metrics` and publish the new policy."""
    tokenizer = load_tokenizer(config.model.hf_checkpoint)
    run = inputs.run
    prompts = prompts_for(run, "prompts", tokenizer, warm).prompts
    assert isinstance(tokenizer.eos_token_id, int)
    sequences = [label_sequence(p, tokenizer) for p in prompts]

    def train(learners: Learners, step: int) -> Metrics:
        metrics = []
        for place in range(step * config.sft.sft_steps, (step + 1) * config.sft.sft_steps):
            draws = draw(
                len(prompts),
                start=place * config.sft.sft_batch_size,
                count=config.sft.sft_batch_size,
                seed=config.seeds.seed,
                shuffle=True,
            )
            batch = [sequences[d.prompt_id] for d in draws]
            loss = cross_entropy(sum(s.response_len for s in batch))
            found = learners.actor.train_step(batch, loss, inspect_dir=inspection_dir(run, step))
            metrics.append({f"sft/{name}": value for name, value in found.items()})
        return metrics

    options = trainer_options(config, temperature=1.0)
    metrics = train_and_publish(inputs, output, warm, options=options, train=train)
    output.write("metrics", metric_table(metrics))


def label_sequence(prompt: Prompt, tokenizer) -> TrainSequence:
    """Prompt, label and end token; only the last two are learnt."""
    answer = [*tokenizer.encode(prompt.label, add_special_tokens=False), tokenizer.eos_token_id]
    return TrainSequence(
        sample_id=prompt.prompt_id,
        tokens=np.array([*prompt.tokens, *answer], dtype=np.int64),
        response_len=len(answer),
        fields={"mask": np.ones(len(answer), np.float32)},
    )


def cross_entropy(num_tokens: int) -> StepLoss:
    """-mean log p over all answer tokens of the step."""

    def loss(batch) -> LossParts:
        (logp_BT,) = valid(batch["mask_BT"], batch["logp_BT"])
        weight_BT = token_mean_weights(batch["mask_BT"], num_tokens=num_tokens)
        return LossParts(-(weight_BT * logp_BT).sum(), {})

    return loss
