"""The policy in training.

Shapes: B responses, T response positions.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from relax.trainer.build import Use
from relax.trainer.learner import Learner
from relax.trainer.options import TrainerOptions
from relax.trainer.sequences import TrainSequence
from relax.trainer.sharded import ShardedModel


class Actor(Learner):
    """A policy with its optimizer; losses read logp_BT and entropy_BT."""

    @classmethod
    def load(
        cls,
        model_dir: Path,
        options: TrainerOptions,
        *,
        num_schedule_steps: int,
        use: Use = "train",
    ) -> "Actor":
        """Read a Hugging Face directory, shard it over the ranks and start a fresh optimizer.

        use: "restore" where `restore` is called next: the weights are not read then.
        """
        return cls(ShardedModel(model_dir, options, "logp", use=use), options, num_schedule_steps)

    def logp(self, sequences: Sequence[TrainSequence], temperature: float) -> list[np.ndarray]:
        """Log-probabilities of every response, float32 [response_len] each, on every rank."""
        return self._model.rows(sequences, "logp", temperature)

    def top_words(self, sequences: Sequence[TrainSequence], num_top: int) -> list[np.ndarray]:
        """The num_top likeliest words of every response token: int32 [response_len, num_top]."""
        return self._model.top_words(sequences, num_top)
