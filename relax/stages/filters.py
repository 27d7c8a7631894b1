"""Which groups dynamic sampling keeps: a table of filters, and the user's own.

Importing this loads nothing heavy: flows check the setting with it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from relax.custom import FORMS, load_function
from relax.errors import ConfigError
from relax.flags import nearest

FLAG = "--dynamic-sampling-filter-path"
SIGNATURE = ("group",)

Group = Mapping[str, Sequence]
"""Columns of one group by name: reward, raw_reward, response_len, truncated, response."""
Filter = Callable[[Group], bool]


def reward_spread(group: Group) -> bool:
    """Rewards that differ: the group has advantages that are not zero (DAPO, arXiv:2503.14476)."""
    return min(group["reward"]) < max(group["reward"])


def raw_reward_spread(group: Group) -> bool:
    """What the verifier gave differs, whatever overlong shaping and post-processing made of it."""
    return min(group["raw_reward"]) < max(group["raw_reward"])


FILTERS: dict[str, Filter] = {
    "reward_spread": reward_spread,
    "raw_reward_spread": raw_reward_spread,
}


def is_named(setting: str) -> bool:
    """Whether it is one of ours; ConfigError when it is neither that nor a path."""
    if setting in FILTERS:
        return True
    if ":" not in setting:
        raise ConfigError(
            f"{FLAG} = {setting!r}: known: {', '.join(FILTERS)}{nearest(setting, FILTERS)}; "
            f"or {FORMS}"
        )
    return False


def load_filter(setting: str) -> Filter:
    """The filter that the setting names: group -> whether it is kept."""
    if is_named(setting):
        return FILTERS[setting]
    return load_function(setting, flag=FLAG, signature=SIGNATURE)
