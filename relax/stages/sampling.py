"""Sampling in fixed shards, with what there is to see of it and to say when it fails."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

from relax.engines.conversation import Sampled
from relax.stages.engines import Done, Shard, drop_engines
from relax.stages.shard_faults import ShardFailed, told
from relax.store import Output

LINE_EVERY_S = 10.0


def sampled(
    warm: Any, shards: Sequence[Shard], *, where: str, prompt_ids: Sequence[int], size: int
) -> Iterator[Done]:
    """Shards as the warm engines finish them.

    prompt_ids: one a group of all shards that there are; a shard of k requests has k / size groups,
    and shards are of the same number of groups but for the last. Engines that fail are dropped.
    """
    if not shards:
        return  # all were finished before; no engine is loaded for that
    try:
        yield from warm.engine.run(shards)
    except ShardFailed as failed:
        drop_engines(warm)
        shard = next(s for s in shards if s.number == failed.number)
        first = shard.first // size
        ids = prompt_ids[first : first + len(shard.requests) // size]
        raise told(failed, where, ids, size) from failed.why
    except BaseException:
        drop_engines(warm)
        raise


class Watch:
    """Counts what comes, says so now and then, and measures it at the end."""

    def __init__(self, name: str, asked: int, reused: int) -> None:
        self.name, self.asked, self.reused = name, asked, reused
        self.done, self.tokens, self.longest, self.cached = reused, 0, 0, 0
        self.longest_wait_s = 0.0
        self._start = self._last = self._spoke = time.perf_counter()
        if reused:
            print(f"{name}: {reused}/{asked} responses were finished before", file=sys.stderr)

    def add(self, shard: Shard, responses: Sequence[Sampled]) -> None:
        """One finished shard."""
        now = time.perf_counter()
        lengths = [len(r.tokens) for r in responses]
        self.done += len(responses)
        self.tokens += sum(sum(r.mask) for r in responses)
        self.longest = max(self.longest, *lengths)
        self.cached = max(
            self.cached, sum(len(r.prompt_tokens) for r in shard.requests) + sum(lengths)
        )
        self.longest_wait_s, self._last = max(self.longest_wait_s, now - self._last), now
        if now - self._spoke >= LINE_EVERY_S:
            self._spoke = now
            print(
                f"{self.name}: {self.done}/{self.asked} responses, {self.rate():,.0f} tokens/s, "
                f"longest {self.longest} tokens, {self.cached:,} tokens cached",
                file=sys.stderr,
            )

    def rate(self) -> float:
        """Sampled tokens per second."""
        return self.tokens / max(time.perf_counter() - self._start, 1e-9)

    def measure(self, output: Output) -> None:
        """All of it as measures of the stage, outside every hash."""
        output.measure("responses asked", self.asked)
        output.measure("responses reused", self.reused)
        if self.done == self.reused:
            return
        output.measure("seconds/sample", time.perf_counter() - self._start)
        output.measure("seconds/longest wait for a shard", self.longest_wait_s)
        output.measure("tokens/s", self.rate())
        output.measure("tokens/longest response", self.longest)
        output.measure("tokens/largest cache", self.cached)
