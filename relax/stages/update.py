"""The optimizer steps of one rollout, and the policy that they make."""

from __future__ import annotations

import hashlib
import time

import numpy as np

from relax.algorithms import ALGORITHMS
from relax.algorithms.loss import StepCounts, step_loss
from relax.config import Config
from relax.stages.metrics import metric_table
from relax.stages.perform import Inputs, Warm
from relax.stages.training import Metrics, train_and_publish, trainer_options
from relax.store import Output, Run, rows
from relax.trainer.actor import Actor, LossParts, TrainSequence


def run(config: Config, inputs: Inputs, output: Output, warm: Warm) -> None:
    """Write the table `metrics` and publish the new policy, with a checkpoint when one is due."""
    options = trainer_options(config, temperature=config.rollout.rollout_temperature)
    seconds = []

    def train(actor: Actor, step: int) -> Metrics:
        start = time.perf_counter()
        metrics = update(actor, config, inputs.run, step)
        seconds.append(time.perf_counter() - start)
        return metrics

    metrics = train_and_publish(inputs, output, warm, options=options, train=train)
    output.write("metrics", metric_table(metrics))
    output.measure("seconds/train", seconds[-1])
    output.measure("updates redone", len(seconds) - 1)


def update(actor: Actor, config: Config, run: Run, step: int) -> Metrics:
    """All optimizer steps of one rollout; the order of its groups is seeded."""
    sequences = training_sequences(run, step)
    order = group_order(config.seeds.seed, step, config.rollout.rollout_batch_size)
    size = config.rollout.n_samples_per_prompt
    row = ALGORITHMS[config.algorithm.advantage_estimator]
    settings = config.algorithm.model_dump()
    metrics = []
    for groups_G in np.array_split(order, config.optimizer_steps):
        batch = [sequences[g * size + i] for g in groups_G for i in range(size)]
        counts = StepCounts(
            num_tokens=int(sum((s.fields["mask"] != 0).sum() for s in batch)),
            num_responses=len(batch),
            max_response_len=config.rollout.rollout_max_response_len,
        )
        loss = step_loss(row, settings, counts)
        found = actor.train_step(batch, lambda tensors, loss=loss: LossParts(*loss(tensors)))
        metrics.append(_named(found))
    return metrics


def training_sequences(run: Run, step: int) -> list[TrainSequence]:
    """A rollout's responses with their advantages, in the order of sample_id."""
    prompt = rows(run.table(step, "rollout", "prompts"))
    response = rows(run.table(step, "rollout", "responses"))
    advantage = rows(run.table(step, "advantage", "advantages"))
    prompt_of = dict(zip(prompt.group_id.tolist(), prompt.prompt_tokens, strict=True))
    advantage_of = dict(
        zip(advantage.sample_id.tolist(), advantage.advantage.tolist(), strict=True)
    )
    sequences = []
    for place, sample_id in enumerate(response.sample_id.tolist()):
        tokens_T = response.tokens[place]
        prompt_tokens = prompt_of[int(response.group_id[place])]
        sequences.append(
            TrainSequence(
                sample_id=sample_id,
                tokens=np.concatenate([prompt_tokens, tokens_T]).astype(np.int64),
                response_len=len(tokens_T),
                fields={
                    "mask": response.mask[place].astype(np.float32),
                    "advantage": np.full(len(tokens_T), advantage_of[sample_id], np.float32),
                    "rollout_logp": response.rollout_logp[place].astype(np.float32),
                },
            )
        )
    return sequences


def group_order(seed: int, step: int, num_groups: int) -> np.ndarray:
    """The order in which a rollout's groups are trained on: a function of seed and step alone."""
    key = hashlib.sha256(f"update-order/{seed}/{step}".encode()).digest()
    draws = np.frombuffer(hashlib.shake_256(key).digest(8 * num_groups), dtype="<u8")
    return np.argsort(draws, kind="stable")


def _named(found: dict[str, float]) -> dict[str, float]:
    """The trainer's own numbers under the names of the metrics table."""
    own = {"grad_norm": "train/grad_norm", "lr": "train/lr"}
    named = {own.get(name, name): value for name, value in found.items()}
    named.pop("loss")  # train/loss is the same number
    return named
