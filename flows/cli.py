"""`relax train | sft | evaluate`: from flags to a flow, with or without Prefect."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from flows.opening import check
from relax.algorithms.inheritance import load
from relax.flags import build_parser, overrides_of, parse_flags

ABOUT = {
    "train": "Train by reinforcement. Run the same command again to continue after anything.",
    "sft": "Train on prompts and labels (supervised), before reinforcement.",
    "evaluate": "Answer held-out prompts with the newest policy of a run.",
}

EXAMPLES = {
    "train": "relax train recipes/gsm8k_cpu.toml --prompt-data train.jsonl "
    "--hf-checkpoint models/m --run-dir runs/x",
    "sft": "relax sft recipe.toml --prompt-data train.jsonl --hf-checkpoint models/m "
    "--run-dir runs/warm",
    "evaluate": "relax evaluate recipe.toml --run-dir runs/x --eval-prompt-data test.jsonl",
}


def train(argv: Sequence[str]) -> int:
    """`relax train`."""
    return _command("train", argv)


def sft(argv: Sequence[str]) -> int:
    """`relax sft`."""
    return _command("sft", argv)


def evaluate(argv: Sequence[str]) -> int:
    """`relax evaluate`."""
    return _command("evaluate", argv)


def _command(name: str, argv: Sequence[str]) -> int:
    parser = build_parser(f"relax {name}", ABOUT[name], EXAMPLES[name])
    parser.add_argument(
        "--no-prefect", action="store_true", help="run the same loop without Prefect"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="print the plan and every job's script; run nothing"
    )
    known = parse_flags(parser, argv)
    overrides = overrides_of(known)
    config, reset = load(known.config, overrides)
    if reset:
        print(reset, file=sys.stderr)
    if "dry_run" in known:
        from flows.preview import preview

        print(preview(config, importlib.import_module(f"flows.{name}").steps))
        return 0
    check(config)  # faults are told before anything is started
    if "no_prefect" in known:
        from tasks.stage import perform

        importlib.import_module(f"flows.{name}").run(config, perform)
        return 0
    from flows.server import ensure_server

    ensure_server()
    flow = getattr(importlib.import_module(f"flows.{name}"), name)
    state = flow(config=known.config or "", overrides=overrides, return_state=True)
    if state.is_cancelled():
        print(state.message, file=sys.stderr)
        return 130
    state.result()  # raises what the flow raised
    return 0
