"""Sequences and losses that several trainer tests, and the processes they start, share."""

import numpy as np

from relax.trainer.sequences import LossParts, TrainSequence


def make_sequences(count: int, seed: int = 0) -> list[TrainSequence]:
    """Ragged ones; three after each other answer the same prompt."""
    generator = np.random.default_rng(seed)
    sequences = []
    for sample_id in range(count):
        length = int(generator.integers(1, 12))
        if sample_id % 3 == 0:
            prompt = generator.integers(0, 61, int(generator.integers(1, 6)))
        tokens = np.concatenate([prompt, generator.integers(0, 61, length)])
        fields = {
            "advantage": generator.normal(size=length).astype(np.float32),
            "mask": np.ones(length, np.float32),
        }
        sequences.append(TrainSequence(sample_id, tokens, length, fields))
    return sequences


def policy_gradient(sequences):
    """-A logp minus a little entropy, per token of the whole step."""
    num_tokens = sum(sequence.response_len for sequence in sequences)

    def loss(batch):
        mask_BT = batch["mask_BT"]
        pg = -(batch["advantage_BT"] * batch["logp_BT"] * mask_BT).sum() / num_tokens
        entropy = (batch["entropy_BT"] * mask_BT).sum() / num_tokens
        return LossParts(pg - 0.01 * entropy, {"entropy_loss": entropy.detach()})

    return loss


def value_regression(sequences):
    """Squared error to the advantage field, per token of the whole step."""
    num_tokens = sum(sequence.response_len for sequence in sequences)

    def loss(batch):
        error_BT = (batch["value_BT"] - batch["advantage_BT"]) * batch["mask_BT"]
        return LossParts(error_BT.square().sum() / num_tokens)

    return loss
