"""`relax check CONFIG [flags]`: the plan of a run, as text or JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict

from relax.algorithms import inheritance
from relax.doctor.plan import Plan, plan
from relax.errors import ConfigError
from relax.flags import build_parser, overrides_of, parse_flags

ABOUT = """What a configuration will do: stages and where they run, batches, memory, disk.
Exit code: 0 it would start here, 1 it would not (the reasons are listed), 2 it is not valid."""

EXAMPLE = (
    "relax check recipes/gsm8k_cpu.toml --prompt-data train.jsonl --hf-checkpoint models/m "
    "--run-dir runs/x"
)


def check(argv: Sequence[str]) -> int:
    """Print the plan of a configuration."""
    parser = build_parser("relax check", ABOUT, EXAMPLE)
    parser.add_argument("--cluster", action="store_true", help="ask SLURM instead: would it do?")
    parser.add_argument("--run", action="store_true", help="with --cluster: run a small job, too")
    parser.add_argument("--format", choices=("text", "json"), help="[text]")
    parser.add_argument("--ranks", metavar="X", help="ranks of the update [of its allocation]")
    parser.add_argument("--gpu", action="store_true", help="count GPUs [if its allocation has any]")
    known = parse_flags(parser, argv)
    given = vars(known)
    config, reset = inheritance.load(known.config, overrides_of(known))
    if "run" in given:
        raise ConfigError("--run: goes with --cluster, which asks SLURM")
    found = plan(config, ranks=_ranks(given.get("ranks")), gpu=given.get("gpu"))
    print(as_json(found) if given.get("format") == "json" else as_text(found))
    for line in (reset, *found.warnings):
        if line:
            print(f"warning: {line}", file=sys.stderr)
    for line in found.forbidden:
        print(f"not with {config.algorithm.advantage_estimator}: {line}", file=sys.stderr)
    for line in found.problems:
        print(f"would not start here: {line}", file=sys.stderr)
    if found.forbidden or found.problems:
        return 2 if found.forbidden else 1
    print("would start here", file=sys.stderr)
    return 0


def _ranks(text: str | None) -> int | None:
    if text is None:
        return None
    if not text.isdigit() or int(text) < 1:
        raise ConfigError(f"--ranks = {text!r}: must be a whole number, 1 or more")
    return int(text)


def as_json(found: Plan) -> str:
    """The plan for programs."""
    return json.dumps(asdict(found), indent=1)


def as_text(found: Plan) -> str:
    """The plan for people: a heading a section, a line a fact."""
    lines = []
    for name, facts in found.sections.items():
        width = max(map(len, facts))
        lines.append(name)
        lines += [f"  {fact:{width}}  {value}" for fact, value in facts.items()]
    return "\n".join(lines)
