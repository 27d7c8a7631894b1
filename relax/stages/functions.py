"""The user's own functions: which settings name them, what they take, how a stage comes by one.

A run goes on with the functions that it began with: a stage refuses one whose source is another
by now, and a job takes that of a file from the copy of the code that it runs. Importing this loads
nothing heavy: flows check settings with it.

An advantage or a loss may have further parameters with defaults: those named like a setting of
[algorithm] get its value. Shapes: B responses, T response positions (right-padded).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import relax
from relax.algorithms import rules
from relax.config import Config, flag_of
from relax.custom import FORMS, Kind, identity, load_function, split
from relax.errors import ConfigError
from relax.flags import nearest
from relax.stages.filters import FILTERS

CODE = Path(relax.__file__).resolve().parents[1]
"""The checkout, or in a job the copy of it in RUN/code."""


@dataclass(frozen=True)
class UserFunction:
    """One row: the function that `setting` names."""

    setting: str
    parameters: tuple[str, ...]
    """Its leading parameters, by name."""
    stage: str
    """The stage that calls it."""
    kind: Kind = "plain"
    ours: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    """Functions of ours that the setting may name by a word instead."""


FUNCTIONS: dict[str, UserFunction] = {
    row.setting: row
    for row in (
        UserFunction("custom_rm_path", ("response_text", "label"), "reward"),
        UserFunction("custom_reward_post_process_path", ("reward_B", "group_id_B"), "reward"),
        UserFunction("dynamic_sampling_filter_path", ("group",), "reward", ours=FILTERS),
        UserFunction("custom_generate_function_path", ("conversation",), "rollout", kind="async"),
        UserFunction("custom_advantage_path", ("reward_B", "group_id_B", "mask_BT"), "advantage"),
        UserFunction(
            "custom_loss_path", ("logp_BT", "old_logp_BT", "advantage_BT", "mask_BT"), "update"
        ),
    )
}
"""Setting -> its row. What they give:

custom_rm_path: a number.
custom_reward_post_process_path: reward_B, what advantages are made of.
dynamic_sampling_filter_path: whether the group is kept.
custom_generate_function_path: nothing; the response is what was said in the conversation.
custom_advantage_path: advantage_B, or advantage_BT where tokens differ; finite.
custom_loss_path: an objective, (loss_BT, clipped_BT), differentiable in logp_BT.
"""


@dataclass(frozen=True)
class Named:
    """A function as a run knows it; it can be sent to another process."""

    setting: str
    path: str
    known: str
    """The identity of its source when the run began."""

    def load(self) -> Callable[..., Any]:
        """Import it; ConfigError where it cannot be, or is not the one the run began with."""
        row = FUNCTIONS[self.setting]
        if self.path in row.ours:
            return row.ours[self.path]
        source = split(self.path, flag_of(self.setting))[0]
        return load_function(
            self.path,
            flag=flag_of(self.setting),
            signature=row.parameters,
            kind=row.kind,
            known=self.known,
            copy=CODE / copied_as(self.setting, source) if source.endswith(".py") else None,
        )


def named(config: Config, setting: str, sources: Mapping[str, str]) -> Named | None:
    """What `setting` names, as the run with these `sources` knows it; None where it is empty."""
    path = rules.value_of(config, setting)
    return Named(setting, path, sources.get(setting, "")) if path else None


def loaded(config: Config, setting: str, sources: Mapping[str, str]) -> Callable[..., Any] | None:
    """The function that `setting` names, None where it is empty. ConfigError like Named.load."""
    found = named(config, setting, sources)
    return found and found.load()


def own_path(config: Config, setting: str) -> str:
    """The path of the user's own function; "" where there is none, or it is one of ours.

    ConfigError for a word that is neither.
    """
    value, ours = rules.value_of(config, setting), FUNCTIONS[setting].ours
    if value and ours and ":" not in value and value not in ours:
        raise ConfigError(
            f"{flag_of(setting)} = {value!r}: known: {', '.join(ours)}{nearest(value, ours)}; "
            f"or {FORMS}"
        )
    return "" if value in ours else value


def source_of(config: Config, setting: str) -> str:
    """What keys hold of the setting: the identity of the user's function, or the word for ours."""
    path = own_path(config, setting)
    return identity(path, flag=flag_of(setting)) if path else rules.value_of(config, setting)


def copied_as(setting: str, source: str | Path) -> Path:
    """Where a copy of the code has the file `source` that the setting names."""
    return Path("custom") / setting / Path(source).name
