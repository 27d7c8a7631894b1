"""The command `relax`: finds the subcommand, turns errors of the user into one line."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import entry_points

from relax import __version__
from relax.errors import ConfigError

GROUP = "relax.commands"
Command = Callable[[Sequence[str]], int]

COMMANDS = {
    "train": "train by reinforcement; the same command continues after anything",
    "sft": "train on prompts and labels, before reinforcement",
    "evaluate": "held-out accuracy of a run's newest policy",
    "check": "what a configuration will do: stages, batches, memory, disk",
    "show": "what a run holds; one response, token by token",
    "sql": "ask one or several runs anything",
    "verify": "is a run on disk what its manifests say?",
    "export": "copy a published policy out of a run",
    "fork": "a new run from a step of another, to go on with other settings",
    "replay": "compute a step again; is it what was committed, to the bit?",
}

USAGE = """usage: relax COMMAND ...

Reinforcement-learning post-training of language models as a resumable workflow.

{commands}

examples:
  relax check recipes/gsm8k_cpu.toml --prompt-data train.jsonl
  relax train recipes/gsm8k_cpu.toml --prompt-data train.jsonl --run-dir runs/x
  relax sql runs/x --question reward-by-step

relax COMMAND --help: settings and an example. --debug: tracebacks. --version
exit code: 0 done, 1 failed, 2 wrong settings or usage, 130 stopped by Ctrl-C"""

BUILT_IN = {
    "sql": "relax.analytics.cli:sql",
    "show": "relax.analytics.show:show",
    "verify": "relax.analytics.verify:verify",
    "export": "relax.analytics.verify:export",
    "fork": "relax.analytics.fork:fork",
    "replay": "relax.analytics.replay:replay",
    "check": "relax.doctor.cli:check",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; the exit code is 0, 1 for errors, 2 for wrong usage, 130 for Ctrl-C."""
    words = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in words
    words = [w for w in words if w != "--debug"]
    if words[:1] == ["--version"]:
        print(f"relax {__version__}")
        return 0
    if words[:1] == ["help"] and len(words) > 1:
        words = [words[1], "--help"]
    if not words or words[0] in ("-h", "--help", "help"):
        print(usage())
        return 0 if words else 2
    try:
        code = command(subcommand(words))(words[1:])
        sys.stdout.flush()  # a reader that left is noticed here, not by the interpreter's own end
        return code
    except (ValueError, OSError) as error:
        if isinstance(error, BrokenPipeError):
            return _reader_left()
        if debug or not is_for_user(error):
            raise
        print(f"relax {words[0]}: {said(error)}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt as stop:
        if debug:
            raise
        print(str(stop) or "interrupted; run the same command again to continue", file=sys.stderr)
        return 130


def usage() -> str:
    """What `relax --help` prints: it fits a screen."""
    known = {*COMMANDS, "check-cluster"}
    offered = sorted({entry.name for entry in entry_points(group=GROUP)} - known)
    lines = [f"  {name:9} {what}" for name, what in COMMANDS.items()]
    lines += [f"  also: {', '.join(offered)}"] if offered else []
    return USAGE.format(commands="\n".join(lines))


def _reader_left() -> int:
    """`relax sql ... | head`: the reader has what it wanted; say nothing, also not at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def subcommand(words: Sequence[str]) -> str:
    """`check --cluster` asks SLURM, which relax itself does not know."""
    return "check-cluster" if words[0] == "check" and "--cluster" in words else words[0]


def command(name: str) -> Command:
    """The subcommand called `name`; ConfigError names the nearest one there is."""
    from importlib import import_module

    from relax.flags import nearest

    if name in BUILT_IN:
        module, function = BUILT_IN[name].split(":")
        return getattr(import_module(module), function)
    offered = {entry.name: entry for entry in entry_points(group=GROUP)}
    if name not in offered:
        hint = nearest(name, [*BUILT_IN, *offered])
        raise ConfigError(f"no such command{hint}; see relax --help")
    try:
        return offered[name].load()
    except ModuleNotFoundError as error:
        if error.name and error.name.split(".")[0] in ("flows", "tasks", "slurm"):
            raise ConfigError(
                "needs the checkout: flows, tasks and slurm are not in the wheel; "
                "clone the repository and `pip install -e .`"
            ) from None
        raise


def said(error: Exception) -> str:
    """The text of an error; of one that the system gave for a file, the file first."""
    if isinstance(error, OSError):
        return f"{error.filename}: cannot be used: {error.strerror}"
    return str(error)


def is_for_user(error: Exception) -> bool:
    """Whether an error's text is the whole message: our own families, and files of the user's."""
    if isinstance(error, OSError):
        return error.filename is not None
    families = {"ConfigError", "ArtifactError", "TrainingError", "JobError", "FunctionError"}
    return any(cls.__name__ in families for cls in type(error).__mro__)
