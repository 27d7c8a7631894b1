"""The order in which prompts are drawn: a pure function of (number of prompts, seed, position)."""

from dataclasses import dataclass

import numpy as np

from relax.data.seeds import digest
from relax.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Draw:
    """One place of the prompt stream. Example: Draw(prompt_id=17, epoch=1, position=3)."""

    prompt_id: int
    """Index into PromptSource.prompts (not Prompt.prompt_id, which counts dropped rows too)."""
    epoch: int
    """How many whole passes over the prompts came before."""
    position: int
    """Place within the epoch, from 0."""


def permutation(num_prompts: int, *, seed: int, epoch: int, shuffle: bool) -> np.ndarray:
    """Give the order of one epoch: int64 [num_prompts], the identity when not shuffled.

    Prompts are sorted by the raw 64-bit output of Philox4x64-10 keyed by (seed, epoch). NumPy keeps
    the raw streams of its bit generators stable between releases, but not Generator.permutation.
    """
    if not shuffle:
        return np.arange(num_prompts)
    key = int.from_bytes(digest("order", seed, epoch)[:16], "big")
    return np.argsort(np.random.Philox(key=key).random_raw(num_prompts), kind="stable")


def draw(num_prompts: int, *, start: int, count: int, seed: int, shuffle: bool) -> list[Draw]:
    """Give places start .. start + count - 1 of the endless stream of epochs.

    The stream is the concatenation of one permutation an epoch, so every prompt comes once an
    epoch, however the stream is cut into steps, and step k resumes at start = k * prompts per step.

    Raises ConfigError when there is no prompt, or start or count is negative.
    """
    if num_prompts < 1 or start < 0 or count < 0:
        raise ConfigError(
            f"draw: num_prompts = {num_prompts}, start = {start}, count = {count}; "
            "at least one prompt, and start and count of 0 or more, are needed"
        )
    draws: list[Draw] = []
    for epoch in range(start // num_prompts, -(-(start + count) // num_prompts)):
        order = permutation(num_prompts, seed=seed, epoch=epoch, shuffle=shuffle)
        first = max(start - epoch * num_prompts, 0)
        end = min(start + count - epoch * num_prompts, num_prompts)
        draws += [Draw(int(order[place]), epoch, place) for place in range(first, end)]
    return draws
