"""One response, its tokens coloured by log-probability, ratio or advantage.

Shapes: T response tokens.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from relax.errors import ConfigError
from relax.schema import TABLES
from relax.store import Run, rows

COLOURS = ("logp", "ratio", "advantage")
PARTS = (
    ("reward", "rewards"),
    ("score", "scores"),
    ("advantage", "advantages"),
)
STOPS = ((95, 8, 8), (238, 238, 238), (8, 95, 8))
"""Background from low over middle to high."""


def sample(run: Run, step: int, sample_id: int) -> dict[str, Any]:
    """Everything that is committed about one response, column by column."""
    if run.manifest(step, "rollout") is None:
        raise ConfigError(f"step {step}: no rollout committed; relax show {run.root} lists what is")
    found = _one(run.table(step, "rollout", "responses"), "sample_id", sample_id)
    if found is None:
        total = run.committed(step, "rollout").tables["responses"].rows
        raise ConfigError(
            f"sample {sample_id}: not there; step {step} has samples 0 to {total - 1}"
        )
    prompt = _one(run.table(step, "rollout", "prompts"), "group_id", found["group_id"])
    found |= prompt or {}
    for stage, name in PARTS:
        if run.manifest(step, stage):
            found |= _one(run.table(step, stage, name), "sample_id", sample_id) or {}
    return found


def _one(table: Any, key: str, value: int) -> dict[str, Any] | None:
    places = np.flatnonzero(table.column(key).to_numpy() == value)
    if not len(places):
        return None
    return {name: column[0] for name, column in vars(rows(table.slice(places[0], 1))).items()}


def token_values(found: dict[str, Any], colour: str) -> np.ndarray:
    """What tokens are coloured by, one number each: shape [T]."""
    logp_T = np.asarray(found["rollout_logp"], np.float64)
    if colour == "logp":
        return logp_T
    if colour == "ratio":
        if found.get("old_logp") is None:
            raise ConfigError("--color ratio: the step has no old_logp (no score stage)")
        return np.exp(np.asarray(found["old_logp"], np.float64) - logp_T)
    if found.get("advantage") is None:
        raise ConfigError("--color advantage: the step has no advantages yet")
    per_token = found.get("token_advantage")
    if per_token is not None:
        return np.asarray(per_token, np.float64)
    return np.full(len(logp_T), float(found["advantage"]))


def shade(value: float, colour: str) -> tuple[int, int, int]:
    """Background of a token: red for low, green for high, white where nothing is to be said."""
    scaled = {
        "logp": 1.0 + max(value, -8.0) / 4.0,
        "ratio": max(-1.0, min(1.0, (value - 1.0) / 0.2)),
        "advantage": max(-1.0, min(1.0, value / 2.0)),
    }[colour]
    low, middle, high = STOPS
    end, share = (low, -scaled) if scaled < 0 else (high, scaled)
    red, green, blue = (round(m + (e - m) * share) for m, e in zip(middle, end, strict=True))
    return red, green, blue


def pieces(run: Run, tokens: list[int]) -> list[str]:
    """The text of each token; its number where no tokenizer is left (each policy has the same)."""
    for place in (Path(run.config.model.hf_checkpoint), *run.root.glob("policies/[0-9]*")):
        if (place / "tokenizer.json").exists():
            from tokenizers import Tokenizer

            tokenizer = Tokenizer.from_file(str(place / "tokenizer.json"))
            texts = [tokenizer.decode([t], skip_special_tokens=False) for t in tokens]
            return [x or f"<{t}>" for x, t in zip(texts, tokens, strict=True)]
    return [f"<{t}>" for t in tokens]


def show_sample(run: Run, step: int, sample_id: int, colour: str, by_token: bool) -> None:
    """Print one response."""
    found = sample(run, step, sample_id)
    value_T = token_values(found, colour)
    texts = pieces(run, [int(t) for t in found["tokens"]])
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    for name in ("sample_id", "group_id", "prompt_id", "policy_version", "finish_reason", "label"):
        console.print(f"{name:15} {found[name]}", markup=False)
    for name in ("raw_reward", "reward", "advantage", "response_len", "rollout_logp_sum"):
        if name in found:
            console.print(f"{name:15} {found[name]:.6g}", markup=False)
    console.rule("prompt", align="left", characters="-")
    console.print(Text(found["prompt"]))
    console.rule(f"response, coloured by {colour}", align="left", characters="-")
    console.print(_coloured(texts, value_T, found["mask"], colour))
    console.print(summary(value_T, np.asarray(found["mask"], bool), colour), style="dim")
    if by_token:
        console.print(_token_table(texts, found))


def summary(value_T: np.ndarray, valid_T: np.ndarray, colour: str) -> str:
    """Range and mean of the valid tokens' values; what a tool said has none of its own."""
    value_N = value_T[valid_T]
    if not len(value_N):
        return f"no valid token among {len(value_T)}" if len(value_T) else "an empty response"
    return (
        f"{colour}: {value_N.min():.4g} to {value_N.max():.4g}, mean {value_N.mean():.4g}; "
        f"{len(value_N)} of {len(value_T)} tokens valid"
    )


def _coloured(texts: list[str], value_T: np.ndarray, mask_T: Any, colour: str) -> Text:
    out = Text()
    for text, value, valid in zip(texts, value_T, mask_T, strict=True):
        red, green, blue = shade(float(value), colour)
        light = red + green + blue > 330
        style = f"{'black' if light else 'white'} on rgb({red},{green},{blue})"
        out.append(text, style=style if valid else "dim strike")
    return out


def _token_table(texts: list[str], found: dict[str, Any]) -> Table:
    kinds = {c.name for t in ("responses", "scores", "advantages") for c in TABLES[t].columns}
    lists = [
        name
        for name, values in found.items()
        if name in kinds and isinstance(values, np.ndarray) and len(values) == len(texts)
    ]
    table = Table("token", "text", *lists, header_style="bold")
    for place, text in enumerate(texts):
        cells = [_number(found[name][place]) for name in lists]
        table.add_row(str(place), Text(repr(text)[1:-1]), *cells)
    return table


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float | np.floating) else str(value)
