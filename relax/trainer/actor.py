"""The policy in training.

Shapes: B responses, T response positions.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from relax.trainer.learner import Learner, NonFiniteError
from relax.trainer.options import TrainerOptions
from relax.trainer.publish import policy_hash
from relax.trainer.sequences import LossParts, StepLoss, TrainSequence
from relax.trainer.sharded import ShardedModel

__all__ = [
    "Actor",
    "LossParts",
    "NonFiniteError",
    "StepLoss",
    "TrainSequence",
    "TrainerOptions",
    "policy_hash",
]


class Actor(Learner):
    """A policy with its optimizer; losses read logp_BT and entropy_BT."""

    @classmethod
    def load(cls, model_dir: Path, options: TrainerOptions, *, num_schedule_steps: int) -> "Actor":
        """Read a Hugging Face directory, shard it over the ranks and start a fresh optimizer."""
        return cls(ShardedModel(model_dir, options, "logp"), options, num_schedule_steps)

    def logp(self, sequences: Sequence[TrainSequence], temperature: float) -> list[np.ndarray]:
        """Log-probabilities of every response, float32 [response_len] each, on every rank."""
        return self._model.rows(sequences, "logp", temperature)

    def top_words(
        self, sequences: Sequence[TrainSequence], num_top: int, temperature: float
    ) -> list[np.ndarray]:
        """The num_top likeliest words of every response token: int64 [response_len, num_top]."""
        return [words for words, _ in self._model.top_words(sequences, num_top, temperature)]
