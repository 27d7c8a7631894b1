"""`relax train | sft | evaluate`: from flags to a flow, with or without Prefect."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence

from relax.flags import build_parser, load_config, overrides_of, parse_flags

ABOUT = {
    "train": "Train by reinforcement. Run the same command again to continue after anything.",
    "sft": "Train on prompts and labels (supervised), before reinforcement.",
    "evaluate": "Answer held-out prompts with the newest policy of a run.",
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
    parser = build_parser(f"relax {name}", ABOUT[name])
    parser.add_argument(
        "--no-prefect", action="store_true", help="run the same loop without Prefect"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="print the plan and every job's script; run nothing"
    )
    known = parse_flags(parser, argv)
    overrides = overrides_of(known)
    config = load_config(known.config, overrides)  # faults are told before anything is started
    if "dry_run" in known:
        from flows.preview import preview

        print(preview(config, importlib.import_module(f"flows.{name}").steps))
        return 0
    if "no_prefect" in known:
        from tasks.stage import perform

        importlib.import_module(f"flows.{name}").run(config, perform)
        return 0
    announce_server()
    flow = getattr(importlib.import_module(f"flows.{name}"), name)
    flow(config=known.config or "", overrides=overrides)
    return 0


def announce_server() -> None:
    """Say what the wait is for, where no Prefect server is given."""
    from prefect.settings import PREFECT_API_URL

    if not PREFECT_API_URL.value() and not os.environ.get("PREFECT_API_URL"):
        print(
            "starting a temporary Prefect server (10-30 s; PREFECT_API_URL names a lasting one, "
            "--no-prefect does without)",
            file=sys.stderr,
        )
