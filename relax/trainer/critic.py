"""The value model in training: the actor's machinery with another head.

Shapes: B responses, T response positions.
"""

from collections.abc import Sequence

import numpy as np

from relax.trainer.learner import Learner
from relax.trainer.sequences import TrainSequence


class Critic(Learner):
    """A value model with its optimizer; losses read value_BT.

    The value at a response token is that of the state before it. A policy directory has no value
    head: it starts at zero.
    """

    head = "value"

    def values(self, sequences: Sequence[TrainSequence]) -> list[np.ndarray]:
        """Values of every response token, float32 [response_len] each, on every rank."""
        return self._model.rows(sequences, "value", 1.0)
