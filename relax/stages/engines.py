"""The engines of a run: one in this process, or several in processes of their own, side by side.

Both are asked for shards of requests and give each back as it is finished.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from relax.config import RolloutSection
from relax.data.prompts import load_tokenizer
from relax.engines import Engine, Request, SamplingParams, open_engine
from relax.engines.conversation import Sampled, converse, plain
from relax.engines.published import with_explicit_head
from relax.errors import ArtifactError
from relax.stages.functions import Named
from relax.stages.models import given_model
from relax.stages.pool import EnginePool
from relax.stages.shard_faults import ShardFailed
from relax.store import Run
from relax.trainer.publish import policy_hash


@dataclass(frozen=True)
class Shard:
    """Requests that are sampled together, and how: `generate` is the user's function, if any.

    `first` is the place of the first request among those of all shards.
    """

    number: int
    first: int
    requests: tuple[Request, ...]
    params: SamplingParams
    generate: Named | None = None
    tokenizer: str = ""


Done = tuple[int, list[Sampled]]


class Engines(Protocol):
    """What a stage samples with."""

    def load(self, policy: Path) -> None:
        """Take the weights in directory `policy`."""
        ...

    def run(self, shards: Sequence[Shard]) -> Iterator[Done]:
        """Sample shards; each is given back as it ends. Raises ShardFailed."""
        ...

    def close(self) -> None:
        """Give back memory and processes."""
        ...


class InProcess:
    """One engine, in this process."""

    def __init__(self, name: str, options: dict[str, Any]) -> None:
        self._engine = open_engine(name, **options)

    def load(self, policy: Path) -> None:
        """Take the weights in directory `policy`."""
        self._engine.load(policy)

    def run(self, shards: Sequence[Shard]) -> Iterator[Done]:
        """Sample shard after shard."""
        for shard in shards:
            try:
                done = answered(self._engine, shard)
            except Exception as error:  # told with the shard's prompts; nothing is swallowed
                raise ShardFailed(shard.number, error) from error
            yield shard.number, done

    def close(self) -> None:
        """Forget the engine."""
        self._engine.close()


def answered(engine: Engine, shard: Shard) -> list[Sampled]:
    """One response a request of the shard."""
    if shard.generate is None:
        return plain(engine, shard.requests, shard.params)
    generate, tokenizer = shard.generate.load(), load_tokenizer(shard.tokenizer)
    return converse(engine, shard.requests, shard.params, generate, tokenizer)


def open_engines(settings: RolloutSection, num_threads: int) -> Engines:
    """Engines as the configuration wants them."""
    name, options = settings.rollout_engine, engine_options(settings)
    if settings.rollout_num_engines == 0:
        return InProcess(name, options)
    return EnginePool(
        name,
        options,
        num_engines=settings.rollout_num_engines,
        gpus_per_engine=settings.rollout_num_gpus_per_engine,
        timeout_s=settings.rollout_timeout_s,
        num_threads=num_threads,
    )


def engine_options(settings: RolloutSection) -> dict[str, Any]:
    """Keyword arguments of the configured engine."""
    return {
        "transformers": {"max_batch_tokens": settings.rollout_max_batch_tokens},
        "vllm": {
            "tensor_parallel_size": settings.rollout_num_gpus_per_engine,
            "gpu_memory_utilization": settings.rollout_gpu_memory_utilization,
        },
        "external": {
            "addresses": settings.rollout_external_engine_addrs,
            "timeout_s": settings.rollout_timeout_s,
            "api_key_variable": settings.rollout_api_key_variable,
        },
    }[settings.rollout_engine]


def engines_for(run: Run, version: int, warm: Any) -> Engines:
    """Engines that hold policy `version`; warm ones that hold another are given its weights."""
    wanted = run.policy_hash(version)
    if warm.engine is None:
        warm.engine = open_engines(run.config.rollout, run.config.run.num_threads)
    if warm.engine_at != wanted:
        warm.engine_at = ""
        warm.engine.load(_policy_for_engines(run, version))
        warm.engine_at = wanted
    return warm.engine


def _policy_for_engines(run: Run, version: int) -> Path:
    """A policy where the engines can read it: servers see neither a node's copy nor a tied head."""
    if version or run.config.rollout.rollout_engine != "external":
        return checked_policy(run, version)
    given = Path(run.config.model.hf_checkpoint).resolve()
    return with_explicit_head(given, run.root.resolve() / "start-with-head")


def drop_engines(warm: Any) -> None:
    """After a failure nothing is known of them: the next stage opens new ones."""
    engines, warm.engine, warm.engine_at = warm.engine, None, ""
    if engines is not None:
        engines.close()


def checked_policy(run: Run, version: int) -> Path:
    """Directory of a policy whose weights are those its manifest names; ArtifactError otherwise."""
    if version == 0:
        return given_model(run, "model")
    path = run.policy_dir(version)
    if policy_hash(path) != run.policy_hash(version):
        raise ArtifactError(f"{path}: weights differ from the manifest that published them")
    return path
