"""The value model in training: the actor's machinery with another head.

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


class Critic(Learner):
    """A value model with its optimizer; losses read value_BT.

    The value at a response token is that of the state before it. A policy directory has no value
    head: it starts at zero.
    """

    @classmethod
    def load(
        cls,
        model_dir: Path,
        options: TrainerOptions,
        *,
        num_schedule_steps: int,
        use: Use = "train",
    ) -> "Critic":
        """Read a policy's or a published critic's directory and start a fresh optimizer.

        use: "restore" where `restore` is called next: the weights are not read then.
        """
        return cls(ShardedModel(model_dir, options, "value", use=use), options, num_schedule_steps)

    def values(self, sequences: Sequence[TrainSequence]) -> list[np.ndarray]:
        """Values of every response token, float32 [response_len] each, on every rank."""
        return self._model.rows(sequences, "value", 1.0)
