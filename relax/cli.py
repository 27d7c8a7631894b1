"""The command `relax`: finds the subcommand, turns errors of the user into one line."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.metadata import entry_points

from relax.errors import ConfigError

Command = Callable[[Sequence[str]], int]

USAGE = """usage: relax COMMAND ...

Reinforcement-learning post-training of language models as a resumable workflow.

  train     train by reinforcement            relax train recipes/gsm8k_cpu.toml --prompt-data FILE
  sft       train on prompts and labels       relax sft recipe.toml --run-dir runs/warm
  evaluate  held-out accuracy of a run        relax evaluate recipe.toml --run-dir runs/x
  sql       ask anything of a run             relax sql runs/x "SELECT * FROM steps"
  check     ask a cluster before a run does   relax check recipe.toml --cluster --run

`relax COMMAND --help` lists the settings of a command. `--debug` shows tracebacks."""

BUILT_IN = {"sql": "relax.analytics.cli:sql"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; the exit code is 0, 1 for errors, 2 for wrong usage, 130 for Ctrl-C."""
    words = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in words
    words = [w for w in words if w != "--debug"]
    if not words or words[0] in ("-h", "--help", "help"):
        print(USAGE)
        return 0 if words else 2
    try:
        return command(words[0])(words[1:])
    except ValueError as error:
        if debug or not is_for_user(error):
            raise
        print(f"relax {words[0]}: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt as stop:
        print(str(stop) or "interrupted; run the same command again to continue", file=sys.stderr)
        return 130


def command(name: str) -> Command:
    """The subcommand called `name`; ConfigError names the nearest one there is."""
    from importlib import import_module

    from relax.flags import nearest

    if name in BUILT_IN:
        module, function = BUILT_IN[name].split(":")
        return getattr(import_module(module), function)
    offered = {entry.name: entry for entry in entry_points(group="relax.commands")}
    if name not in offered:
        raise ConfigError(
            f"no such command{nearest(name, [*BUILT_IN, *offered])}; see relax --help"
        )
    try:
        return offered[name].load()
    except ModuleNotFoundError as error:
        if error.name and error.name.split(".")[0] in ("flows", "tasks", "slurm"):
            raise ConfigError(
                "needs the checkout: flows, tasks and slurm are not in the wheel; "
                "clone the repository and `pip install -e .`"
            ) from None
        raise


def is_for_user(error: ValueError) -> bool:
    """Whether an error is one of the families whose text is the whole message."""
    return type(error).__name__ in ("ConfigError", "ArtifactError", "JobError")
