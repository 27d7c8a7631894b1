"""Which groups dynamic sampling keeps: a table of filters. The user's own is called like them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

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
"""Name -> filter; dynamic_sampling_filter_path takes these, or a path."""
