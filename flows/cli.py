"""`relax train | sft | evaluate`: from flags to a flow, with or without Prefect."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from flows.launch import planned
from flows.opening import checked, handed
from relax.algorithms.inheritance import load
from relax.config import Config
from relax.doctor.settings import warnings_of
from relax.doctor.start import Command
from relax.flags import build_parser, overrides_of, parse_flags
from relax.store import Run

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


def _command(name: Command, argv: Sequence[str]) -> int:
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
    found = checked(config, name)  # faults are told before anything is started
    config, module = found.config, importlib.import_module(f"flows.{name}")
    if "dry_run" in known:
        from flows.preview import preview

        for line in warnings_of(config, name):
            print(f"warning: {line}", file=sys.stderr)
        print(preview(config, module.steps))
        return 0
    if "no_prefect" in known or is_finished(config, module.steps):
        from tasks.stage import perform

        with handed(found):
            module.run(config, perform)
        return 0
    from flows.server import ensure_server

    ensure_server()
    flow = getattr(module, name)
    with handed(found):
        state = flow(config=known.config or "", overrides=overrides, return_state=True)
    if state.is_cancelled():
        print(state.message, file=sys.stderr)
        return 130
    state.result()  # raises what the flow raised
    return 0


def is_finished(config: Config, steps: Callable[[Any, Any], None]) -> bool:
    """Whether all that `steps` asks for is committed: no server is started to say so."""
    if not (Path(config.run.run_dir) / "run.json").exists():
        return False
    run = Run.open(config.run.run_dir)
    if config.run.num_rollout > run.num_updates():
        return False
    plan = planned(steps, SimpleNamespace(config=config, run=run))
    return all(run.manifest(step, stage) for step, stages in plan.items() for stage in stages)
