"""What a sampling engine is: requests in, sampled tokens with their log-probabilities out."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from relax.errors import ArtifactError, ConfigError

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How responses are sampled; the same for every request of a call.

    `temperature` 0 is greedy. `top_k` 0 and `top_p` 1 leave the distribution whole.
    `max_response_len`, `min_tokens` and `max_context_len` (prompt + response; 0: the model's own)
    are in tokens. A response ends with the model's end token (unless `ignore_eos`), with one of
    `stop_token_ids`, or with the token that completes one of the `stop` strings in the decoded
    text; none of these ends it before token number `min_tokens` + 1.

    Raises:
        ConfigError: a value that no engine can use.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_response_len: int = 128
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    max_context_len: int = 0

    def __post_init__(self) -> None:
        _check("temperature", self.temperature, 0 <= self.temperature < float("inf"), ">= 0")
        _check("top_p", self.top_p, 0 < self.top_p <= 1, "in (0, 1]")
        _check("top_k", self.top_k, self.top_k >= 0, ">= 0 (0: all tokens)")
        _check("max_response_len", self.max_response_len, self.max_response_len >= 0, ">= 0")
        _check("min_tokens", self.min_tokens, self.min_tokens >= 0, ">= 0")
        _check("max_context_len", self.max_context_len, self.max_context_len >= 0, ">= 0")
        _check("stop", self.stop, all(self.stop), "a tuple of non-empty strings")

    @property
    def is_truncated(self) -> bool:
        """Whether sampling is from less than the full vocabulary (`logp` never is)."""
        return self.temperature > 0 and (self.top_p < 1 or self.top_k > 0)

    @property
    def is_cut(self) -> bool:
        """Whether some token could not be sampled somewhere: by truncation or by `min_tokens`."""
        return self.is_truncated or self.min_tokens > 0


@dataclass(frozen=True, slots=True)
class Request:
    """One response to sample; `seed` (0 <= seed < 2**63) fixes its randomness in any batch."""

    prompt_tokens: tuple[int, ...]
    seed: int


@dataclass(frozen=True, slots=True)
class Response:
    """A sampled response; empty where the prompt leaves no room.

    `tokens` include the end token that was sampled. `logp[t]` is the log-probability in nats of
    `tokens[t]` under the full-vocabulary softmax of logits / temperature (greedy: temperature 1).
    `finish_reason` is "stop" for an end token or stop string, "length" for a truncated response.
    """

    tokens: list[int]
    logp: list[float]
    finish_reason: FinishReason


class NotFiniteError(ArtifactError):
    """Log-probabilities that are not finite, of the requests with these numbers.

    `batch` is the place of their batch among several at the same time; None: the one under way.
    """

    def __init__(self, message: str, requests: Sequence[int], batch: int | None = None) -> None:
        super().__init__(message, requests, batch)  # all, so that it survives pickling
        self.requests, self.batch = tuple(requests), batch

    def __str__(self) -> str:
        return self.args[0]


class Engine(Protocol):
    """A sampler that holds one policy at a time."""

    def load(self, policy: Path) -> None:
        """Take the weights in directory `policy`; again for another version, without restart."""
        ...

    def sample(self, requests: Sequence[Request], params: SamplingParams) -> list[Response]:
        """Sample one response a request, in the order of the requests."""
        ...

    def sample_batches(
        self, batches: Sequence[Sequence[Request]], params: SamplingParams
    ) -> Iterator[tuple[int, list[Response]]]:
        """Sample batches; each comes with its place as it ends.

        One after another where a response depends on its batch, else all at the same time. Raises
        what `sample` raises.
        """
        ...

    def close(self) -> None:
        """Give back memory and processes."""
        ...


def _check(name: str, value: object, is_valid: bool, allowed: str) -> None:
    if not is_valid:
        raise ConfigError(f"sampling: {name} = {value!r}; must be {allowed}")
