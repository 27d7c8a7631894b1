"""Responses of several turns: a user's async function talks, the engine answers in batches.

Token-in, token-out: what was sampled goes back into the next prompt as the ids that it was, and
only what the function adds is tokenized.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from relax.engines.protocol import (
    Engine,
    FinishReason,
    NotFiniteError,
    Request,
    Response,
    SamplingParams,
)
from relax.errors import ArtifactError, one_line

FLAG = "--custom-generate-function-path"


@dataclass(frozen=True, slots=True)
class Sampled:
    """A whole response. `mask` is true where the policy sampled; elsewhere `logp` is 0."""

    tokens: list[int]
    logp: list[float]
    mask: list[bool]
    finish_reason: FinishReason
    num_turns: int


@dataclass(frozen=True, slots=True)
class Turn:
    """What the policy said in one turn; `finish_reason` "length": there is no room for another."""

    text: str
    tokens: list[int]
    finish_reason: FinishReason


Ask = Callable[[Request, SamplingParams], Awaitable[Response]]


@dataclass
class Conversation:
    """One response in the making. A function samples turns and appends what tools answer."""

    prompt_tokens: tuple[int, ...]
    seed: int
    params: SamplingParams
    tokenizer: Any
    ask: Ask
    tokens: list[int] = field(default_factory=list)
    logp: list[float] = field(default_factory=list)
    mask: list[bool] = field(default_factory=list)
    finish_reason: FinishReason = "stop"
    num_turns: int = 0

    async def sample(self, *, stop: Sequence[str] = (), max_tokens: int | None = None) -> Turn:
        """Let the policy go on, until it ends, writes one of `stop`, or has no room left.

        `max_tokens` bounds this turn alone; the whole response has max_response_len.
        """
        room = self.room if max_tokens is None else min(self.room, max_tokens)
        response = Response([], [], "length")
        if room > 0:
            request = Request((*self.prompt_tokens, *self.tokens), self._turn_seed())
            params = replace(
                self.params,
                max_response_len=room,
                min_tokens=0 if self.num_turns else self.params.min_tokens,
                stop=(*self.params.stop, *stop),
            )
            response = await self.ask(request, params)
        self.num_turns += 1
        self.tokens += response.tokens
        self.logp += response.logp
        self.mask += [True] * len(response.tokens)
        self.finish_reason = response.finish_reason
        return Turn(self._decode(response.tokens), response.tokens, response.finish_reason)

    def append(self, text: str) -> None:
        """Add what the policy did not write, such as a tool's answer; cut where room ends."""
        tokens = self.tokenizer(text, add_special_tokens=False).input_ids
        if len(tokens) > self.room:
            tokens, self.finish_reason = tokens[: self.room], "length"
        self.tokens += tokens
        self.logp += [0.0] * len(tokens)
        self.mask += [False] * len(tokens)

    @property
    def room(self) -> int:
        """Tokens that the response may still grow by."""
        return self.params.max_response_len - len(self.tokens)

    @property
    def text(self) -> str:
        """Everything after the prompt, decoded; never tokenized again."""
        return self._decode(self.tokens)

    def sampled(self) -> Sampled:
        """The response as it stands."""
        return Sampled(self.tokens, self.logp, self.mask, self.finish_reason, self.num_turns)

    def _turn_seed(self) -> int:
        """The request's own seed in the first turn, so that one turn is a plain response."""
        if self.num_turns == 0:
            return self.seed
        turn = hashlib.sha256(f"relax/turn/{self.seed}/{self.num_turns}".encode()).digest()
        return int.from_bytes(turn[:8], "big") >> 1

    def _decode(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=False)


Generate = Callable[[Conversation], Awaitable[None]]


def plain(responses: Sequence[Response]) -> list[Sampled]:
    """Responses of one turn each."""
    return [
        Sampled(r.tokens, r.logp, [True] * len(r.tokens), r.finish_reason, 1) for r in responses
    ]


def converse(
    engine: Engine,
    requests: Sequence[Request],
    params: SamplingParams,
    generate: Generate,
    tokenizer: Any,
) -> list[Sampled]:
    """One response a request by the user's function, in the order of the requests.

    The engine is asked when every conversation that is not over waits for it, so that the batches
    do not depend on how long tools take.
    """
    return asyncio.run(_Table(engine, tokenizer).talk(requests, params, generate))


class _Table:
    """The conversations of a batch, and those among them that wait for the engine."""

    def __init__(self, engine: Engine, tokenizer: Any) -> None:
        self._engine, self._tokenizer = engine, tokenizer
        self._waiting: dict[int, tuple[Request, SamplingParams, asyncio.Future]] = {}
        self._changed = asyncio.Event()

    async def talk(
        self, requests: Sequence[Request], params: SamplingParams, generate: Generate
    ) -> list[Sampled]:
        conversations = [
            Conversation(r.prompt_tokens, r.seed, params, self._tokenizer, self._asking(place))
            for place, r in enumerate(requests)
        ]
        tasks = [asyncio.ensure_future(_one(generate, c, i)) for i, c in enumerate(conversations)]
        for task in tasks:
            task.add_done_callback(lambda _: self._changed.set())
        try:
            while any(not task.done() for task in tasks):
                await self._changed.wait()
                self._changed.clear()
                failed = next((t for t in tasks if t.done() and t.exception()), None)
                if failed is not None:
                    failed.result()
                if self._waiting and len(self._waiting) == sum(not t.done() for t in tasks):
                    self._answer()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return [c.sampled() for c in conversations]

    def _asking(self, place: int) -> Ask:
        async def ask(request: Request, params: SamplingParams) -> Response:
            future = asyncio.get_running_loop().create_future()
            self._waiting[place] = (request, params, future)
            self._changed.set()
            return await future

        return ask

    def _answer(self) -> None:
        """One call of the engine for all that wait with the same conditions to stop.

        Room differs from one to the next; the longest is sampled, the rest cut: a prefix of a
        response is distributed as the response that ends there.
        """
        waiting, self._waiting = dict(sorted(self._waiting.items())), {}
        for alike in dict.fromkeys(_conditions(params) for _, params, _ in waiting.values()):
            asked = {i: entry for i, entry in waiting.items() if _conditions(entry[1]) == alike}
            longest = max((e[1] for e in asked.values()), key=lambda p: p.max_response_len)
            try:
                responses = self._engine.sample([e[0] for e in asked.values()], longest)
            except NotFiniteError as error:
                places = list(asked)
                raise NotFiniteError(str(error), [places[i] for i in error.requests]) from error
            for (_, params, future), response in zip(asked.values(), responses, strict=True):
                future.set_result(_cut(response, params.max_response_len))


def _conditions(params: SamplingParams) -> tuple[tuple[str, ...], int]:
    return params.stop, params.min_tokens


async def _one(generate: Generate, conversation: Conversation, place: int) -> None:
    try:
        await generate(conversation)
    except asyncio.CancelledError:
        raise
    except Exception as error:  # a user's function may fail in any way; all are one line for them
        raise ArtifactError(
            f"{FLAG}: request {place}: {type(error).__name__}: {one_line(error)}"
        ) from error


def _cut(response: Response, most: int) -> Response:
    if len(response.tokens) <= most:
        return response
    return Response(response.tokens[:most], response.logp[:most], "length")
