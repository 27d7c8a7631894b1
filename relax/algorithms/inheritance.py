"""What becomes of a recipe's settings when another algorithm is asked for on top of it."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from relax.algorithms import rules
from relax.algorithms.table import ALGORITHMS
from relax.config import Config
from relax.flags import load_config

SELECTOR = "advantage_estimator"


def load(path: str | Path | None, overrides: Mapping[str, Any] | None = None) -> tuple[Config, str]:
    """load_config, and settings of the file that the algorithm asked for does not use are reset.

    Returns the configuration and one line that names what was reset ("" for nothing). Settings
    that were given in `overrides` are never reset: they are errors where they do not fit.
    """
    given = dict(overrides or {})
    config = load_config(path, given)
    if (
        path is None
        or SELECTOR not in given
        or config.algorithm.advantage_estimator not in ALGORITHMS
    ):
        return config, ""
    before = tomllib.loads(Path(path).read_text()).get("algorithm", {})
    inherited = before.get(SELECTOR, rules.default_of(SELECTOR))
    if inherited == config.algorithm.advantage_estimator:
        return config, ""
    return reset(config, set(given), inherited)


def reset(config: Config, given: set[str], before: str) -> tuple[Config, str]:
    """Put settings that the row does not use, and that are not `given`, back to their defaults."""
    row = rules.row_of(config)
    names = [*rules.unused(config, row)]
    if config.algorithm.kl_loss_type not in (None, *row.kl_types):
        names.append("kl_loss_type")
    stale = [
        name
        for name in dict.fromkeys(names)
        if name not in given and rules.value_of(config, name) != rules.default_of(name)
    ]
    if not stale:
        return config, ""
    told = ", ".join(f"{name} = {rules.value_of(config, name)!r}" for name in stale)
    tree = config.model_dump()
    for name in stale:
        tree[rules.OWNER[name]][name] = rules.default_of(name)
    line = f"{row.name} in place of {before}: reset, for {row.name} does not use them: {told}"
    return Config.model_validate(tree), line
