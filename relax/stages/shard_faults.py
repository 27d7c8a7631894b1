"""What went wrong with a shard, in one line: what, which prompts, what to change."""

from __future__ import annotations

from collections.abc import Sequence

from relax.engines import NotFiniteError
from relax.engines.stopping import listed
from relax.errors import ArtifactError, ConfigError

KEPT = "finished groups are kept: the same command samples only the rest"


class ShardFailed(Exception):
    """A shard that was not sampled, and why."""

    def __init__(self, number: int, why: BaseException) -> None:
        super().__init__(number, why)
        self.number, self.why = number, why


class EngineDied(Exception):
    """The process of an engine ended."""

    def __init__(self, engine: int, code: int | None) -> None:
        super().__init__(engine, code)
        self.engine, self.code = engine, code


class EngineSilent(Exception):
    """An engine that did not answer in time and was ended."""

    def __init__(self, engine: int, timeout_s: float) -> None:
        super().__init__(engine, timeout_s)
        self.engine, self.timeout_s = engine, timeout_s


class EngineFault(Exception):
    """An exception of an engine's process that is no fault of the user's: its traceback."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether host or device memory ran out."""
    return isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"


def told(failed: ShardFailed, where: str, prompt_ids: Sequence[int], size: int) -> BaseException:
    """The error for the user; one that is a fault of the program is returned as it is.

    prompt_ids: of the shard's groups, `size` requests each.
    """
    why = failed.why
    at = f"{where}, prompts {listed(prompt_ids)} (shard {failed.number})"
    if isinstance(why, NotFiniteError):
        bad = sorted({prompt_ids[request // size] for request in why.requests})
        return ArtifactError(f"{where}, prompts {listed(bad)} (shard {failed.number}): {why}")
    if isinstance(why, ArtifactError | ConfigError):
        return type(why)(f"{at}: {why}; {KEPT}")
    if is_out_of_memory(why):
        return ArtifactError(
            f"{at}: out of memory: {brief(why)}; lower rollout_max_batch_tokens (transformers) or "
            f"rollout_gpu_memory_utilization (vllm), or give an engine more GPUs; {KEPT}"
        )
    if isinstance(why, EngineDied):
        return ArtifactError(
            f"{at}: the process of engine {why.engine} died ({ending(why.code)}); see its last "
            f"lines above; {KEPT}"
        )
    if isinstance(why, EngineSilent):
        return ArtifactError(
            f"{at}: engine {why.engine} gave no answer within rollout_timeout_s = "
            f"{why.timeout_s:g} and was ended; raise it, or lower rollout_max_response_len; {KEPT}"
        )
    return why


def told_of_load(why: BaseException, policy: str) -> BaseException:
    """The error for the user where an engine could not take a policy; others as they are."""
    if is_out_of_memory(why):
        return ArtifactError(
            f"{policy}: out of memory while an engine loaded it: {brief(why)}; give an engine more "
            "GPUs, or lower rollout_gpu_memory_utilization (vllm)"
        )
    if isinstance(why, EngineDied):
        return ArtifactError(
            f"{policy}: the process of engine {why.engine} died while it loaded this "
            f"({ending(why.code)}); see its last lines above"
        )
    if isinstance(why, EngineSilent):
        return ArtifactError(
            f"{policy}: engine {why.engine} did not load this within {why.timeout_s:g} s and was "
            "ended; raise rollout_timeout_s"
        )
    return why


def ending(code: int | None) -> str:
    """An exit status in words."""
    if code == -9:
        return "killed by signal 9, often for want of memory"
    if code is not None and code < 0:
        return f"killed by signal {-code}"
    return f"exit status {code}"


def brief(error: BaseException) -> str:
    """The first line of an error's text."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0][:200]
