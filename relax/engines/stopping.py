"""When a response ends, and what engines refuse: requests they cannot sample, broken responses."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from relax.engines.protocol import NotFiniteError, Request, Response, SamplingParams
from relax.errors import ArtifactError, ConfigError


class StopStrings:
    """Finds stop strings in decoded text (special tokens included) as tokens arrive."""

    def __init__(self, tokenizer: Any, stop: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        # Each token is at least a byte of text; the margin keeps the cut at the window's start
        # (half a character, a leading space) away from the match.
        self._window = max(len(text.encode()) for text in stop) + 8

    def completed(self, tokens: Sequence[int]) -> bool:
        """Whether the last of `tokens` completes a stop string."""
        window = tokens[-self._window :]
        text = self._decode(window)
        found = [stop for stop in self._stop if stop in text]
        if not found:
            return False
        # Half a character decodes to U+FFFD, which the next token replaces.
        before = self._decode(window[:-1]).rstrip("\ufffd")
        return any(text.find(stop, max(0, len(before) - len(stop) + 1)) >= 0 for stop in found)

    def _decode(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(
            list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )


def response_limits(
    requests: Sequence[Request], params: SamplingParams, model_context_len: int
) -> list[int]:
    """Most response tokens of each request: `max_response_len`, cut by the context length."""
    lengths = [x for x in (params.max_context_len, model_context_len) if x > 0]
    if not lengths:
        return [params.max_response_len] * len(requests)
    context = min(lengths)
    return [
        max(0, min(params.max_response_len, context - len(request.prompt_tokens)))
        for request in requests
    ]


def check_prompts(requests: Sequence[Request], vocab_size: int) -> None:
    """Refuse prompts that no model can read: empty, or with a token outside its vocabulary."""
    for index, request in enumerate(requests):
        tokens = request.prompt_tokens
        if not tokens:
            raise ArtifactError(f"request {index}: prompt_tokens is empty; a prompt needs a token")
        if not 0 <= min(tokens) <= max(tokens) < vocab_size:
            raise ArtifactError(
                f"request {index}: prompt token {max(tokens)} (smallest {min(tokens)}) is outside "
                f"the model's vocabulary of {vocab_size}; the tokenizer is another model's"
            )


def check_stop(params: SamplingParams, tokenizer: object | None, policy: Path) -> None:
    """Refuse stop strings where no tokenizer can decode: `policy` was published without."""
    if params.stop and tokenizer is None:
        raise ConfigError(
            f"sampling: stop = {params.stop!r} needs a tokenizer, and {policy} has none; "
            "use stop_token_ids or publish the tokenizer with the policy"
        )


def check_finite(responses: Sequence[Response], policy: Path, batch: int = 0) -> None:
    """Refuse responses with log-probabilities that are not finite, naming their requests."""
    bad = [i for i, x in enumerate(responses) if not all(map(math.isfinite, x.logp))]
    if bad:
        raise NotFiniteError(
            f"{policy}: log-probabilities are not finite for request {listed(bad)}; "
            "the policy has diverged, go back to an earlier one",
            bad,
            batch,
        )


def listed(numbers: Sequence[int], most: int = 8) -> str:
    """`3, 7, 9 ... (12 in all)`: numbers for an error line, the first few of them."""
    shown = ", ".join(map(str, numbers[:most]))
    return shown if len(numbers) <= most else f"{shown} ... ({len(numbers)} in all)"
