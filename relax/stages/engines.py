"""The engines of a run: one in this process, or some in processes of their own, side by side.

Both are asked for shards of requests and give each back as it is finished.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from relax.config import Config, RolloutSection
from relax.data.prompts import load_tokenizer
from relax.engines import Engine, NotFiniteError, Request, SamplingParams, open_engine
from relax.engines.conversation import Sampled, converse, plain
from relax.engines.published import with_explicit_head
from relax.errors import ArtifactError
from relax.stages import Stage
from relax.stages.functions import Named
from relax.stages.models import given_model
from relax.stages.pool import EnginePool
from relax.stages.shard_faults import ShardFailed
from relax.store import Run
from relax.trainer.device import device_type, free_memory
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
        """Sample the shards."""
        yield from answered(self._engine, shards)

    def close(self) -> None:
        """Forget the engine."""
        self._engine.close()
        free_memory()


def answered(engine: Engine, shards: Sequence[Shard]) -> Iterator[Done]:
    """Shards as the engine ends them, all with the same parameters. Raises ShardFailed."""
    unfinished = dict(enumerate(shards))
    try:
        for place, done in _answered(engine, shards):
            yield unfinished.pop(place).number, done
    except Exception as error:  # told with the shard's prompts; nothing is swallowed
        at = error.batch if isinstance(error, NotFiniteError) else None
        place = next(iter(unfinished)) if at is None else at
        raise ShardFailed(shards[place].number, error) from error


def _answered(engine: Engine, shards: Sequence[Shard]) -> Iterator[tuple[int, list[Sampled]]]:
    """(place of the shard, its responses)."""
    params = shards[0].params
    if shards[0].generate is None:
        batches = [shard.requests for shard in shards]
        yield from ((i, plain(found)) for i, found in engine.sample_batches(batches, params))
        return
    generate, tokenizer = shards[0].generate.load(), load_tokenizer(shards[0].tokenizer)
    for place, shard in enumerate(shards):
        yield place, converse(engine, shard.requests, params, generate, tokenizer)


def open_engines(config: Config) -> Engines:
    """Engines as the configuration wants them."""
    settings = config.rollout
    name, options = settings.rollout_engine, engine_options(config)
    if not lives_apart(settings):
        return InProcess(name, options)
    return EnginePool(
        name,
        options,
        num_engines=num_engines(settings),
        gpus_per_engine=settings.rollout_num_gpus_per_engine,
        timeout_s=settings.rollout_timeout_s,
        num_threads=config.run.num_threads,
    )


def lives_apart(settings: RolloutSection) -> bool:
    """Whether engines have processes of their own, which can be ended when they hang.

    vLLM always: it takes the process group of its process for its own and destroys it at its end,
    and of several ranks that train together it would wait for the others.
    """
    return settings.rollout_num_engines > 0 or settings.rollout_engine == "vllm"


def num_engines(settings: RolloutSection) -> int:
    """Engines side by side."""
    return max(1, settings.rollout_num_engines)


def sampling_params(settings: RolloutSection) -> SamplingParams:
    """What the engine is asked for in a training rollout."""
    return SamplingParams(
        temperature=settings.rollout_temperature,
        top_p=settings.rollout_top_p,
        top_k=settings.rollout_top_k,
        max_response_len=settings.rollout_max_response_len,
        min_tokens=settings.rollout_min_tokens,
        stop=settings.rollout_stop,
        stop_token_ids=settings.rollout_stop_token_ids,
        ignore_eos=settings.rollout_ignore_eos,
        max_context_len=settings.rollout_max_context_len,
    )


def longest_request(config: Config) -> int:
    """Tokens of the longest prompt with the longest response, of rollouts and evaluations."""
    evaluated = config.data.rollout_max_prompt_len + config.evaluate.eval_max_response_len
    limit = config.rollout.rollout_max_context_len or evaluated
    return max(config.longest_sequence(), min(evaluated, limit))


def engine_options(config: Config) -> dict[str, Any]:
    """Keyword arguments of the configured engine."""
    settings = config.rollout
    return {
        "transformers": {"max_batch_tokens": settings.rollout_max_batch_tokens},
        "vllm": {
            "tensor_parallel_size": settings.rollout_num_gpus_per_engine,
            "gpu_memory_utilization": settings.rollout_gpu_memory_utilization,
            "max_model_len": longest_request(config),
            "is_cut": sampling_params(settings).is_cut,
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
        warm.engine = open_engines(run.config)
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


def make_room(stage: Stage, warm: Any) -> None:
    """Before a stage that trains on GPUs, engines give back theirs; on the CPU they stay warm."""
    if stage.runs_on == "every rank" and device_type() == "cuda":
        drop_engines(warm)


def drop_engines(warm: Any) -> None:
    """The next stage that samples opens new ones. After a failure nothing is known of these."""
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
