"""What goes into the trainer and what a loss hands back.

Shapes: B responses, T response positions (right-padded).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from relax.errors import ArtifactError


@dataclass(frozen=True)
class TrainSequence:
    """One prompt and response.

    tokens: int64, prompt then response; response_len: how many of them are the response.
    fields: name -> float32 [response_len], whatever the loss reads (mask, advantage, ...).

    Example: TrainSequence(7, np.array([1, 2, 3, 9, 0]), 2, {"mask": np.ones(2, np.float32)})
    """

    sample_id: int
    tokens: np.ndarray
    response_len: int
    fields: Mapping[str, np.ndarray] = field(default_factory=dict)

    @property
    def prompt(self) -> np.ndarray:
        """The tokens before the response."""
        return self.tokens[: len(self.tokens) - self.response_len]

    def __post_init__(self) -> None:
        """A response token needs a token before it that predicts it, and a value in each field."""
        if not 0 <= self.response_len < len(self.tokens):
            raise ArtifactError(
                f"sample {self.sample_id}: response_len = {self.response_len} of "
                f"{len(self.tokens)} tokens; a prompt of at least one token must come before it"
            )
        for name, values in self.fields.items():
            if len(values) != self.response_len:
                raise ArtifactError(
                    f"sample {self.sample_id}: {name} has {len(values)} values; "
                    f"the response has {self.response_len} tokens"
                )


@dataclass(frozen=True)
class LossParts:
    """The part of an optimizer step's loss that one micro-batch holds.

    loss: scalar with the whole step's denominators inside, so that parts add up to the step's
    loss. sums: metric name -> scalar, divided by the step's denominators too, added up likewise.
    """

    loss: Tensor
    sums: Mapping[str, Tensor] = field(default_factory=dict)


# Called once per micro-batch with logp_BT and entropy_BT (both want a gradient) and every field of
# the sequences under its name with _BT added. Padding is 0 everywhere.
StepLoss = Callable[[Mapping[str, Tensor]], LossParts]
