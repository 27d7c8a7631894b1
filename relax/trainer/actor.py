"""The policy in training.

Shapes: B responses, T response positions.
"""

from collections.abc import Sequence

import numpy as np

from relax.trainer.learner import Learner
from relax.trainer.sequences import TrainSequence


class Actor(Learner):
    """A policy with its optimizer; losses read logp_BT and entropy_BT."""

    head = "logp"

    def logp(self, sequences: Sequence[TrainSequence], temperature: float) -> list[np.ndarray]:
        """Log-probabilities of every response, float32 [response_len] each, on every rank."""
        return self._model.rows(sequences, "logp", temperature)

    def top_words(self, sequences: Sequence[TrainSequence], num_top: int) -> list[np.ndarray]:
        """The num_top likeliest words of every response token: int32 [response_len, num_top]."""
        return self._model.top_words(sequences, num_top)
