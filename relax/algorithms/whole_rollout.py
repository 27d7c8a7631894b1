"""Advantages of a whole rollout, in the one order that all algorithms share.

Base advantage, `opd_only_reward` zeroing, distillation subtraction, whitening: before the rollout
is cut into optimizer steps. Shapes: B responses, T response positions (right-padded).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from relax.algorithms import advantages
from relax.algorithms.binding import inputs, knobs, resolve
from relax.algorithms.table import Algorithm

Batch = Mapping[str, Tensor]
"""reward_B, group_id_B, mask_BT; and of rollout_logp_BT, old_logp_BT, ref_logp_BT,
teacher_logp_BT, value_BT what the row and the settings ask for."""


@dataclass(frozen=True)
class Advantages:
    """advantage_BT: float32, 0 outside the mask; base_BT: before whitening.

    return_BT: what the critic's values are fitted to, None without a critic. per_response: whether
    all valid tokens of a response have the same advantage by the way it is made.
    """

    advantage_BT: Tensor
    base_BT: Tensor
    return_BT: Tensor | None
    per_response: bool


def compute(
    row: Algorithm,
    batch: Batch,
    settings: Mapping[str, Any],
    custom_advantage: Callable[..., Tensor] | None = None,
) -> Advantages:
    """Advantages of all responses of a rollout by `row`; settings are those of [algorithm].

    `custom_advantage` takes the place of the row's function. Raises ValueError for a reward,
    KL or value that is not finite on a valid token, for leave-one-out over groups of one, and for
    whitening without a valid token.
    """
    mask_BT = batch["mask_BT"]
    base, return_BT = _base(row, batch, settings, custom_advantage)
    per_response = base.ndim == 1
    base_BT = advantages.broadcast(base, mask_BT) if per_response else base
    if settings["use_opd"]:
        if settings["opd_only_reward"]:
            base_BT = torch.zeros_like(base_BT)
        logps = batch["rollout_logp_BT"], batch["teacher_logp_BT"]
        coefficient = settings["opd_kl_coef"]
        base_BT = advantages.distilled(base_BT, *logps, mask_BT, opd_kl_coef=coefficient)
        per_response = False
    advantage_BT = base_BT
    if settings["normalize_advantages"]:
        if not row.whitening:
            raise ValueError(f"normalize_advantages = True: {row.name} has no whitening")
        advantage_BT = resolve(row.whitening, "advantages")(base_BT, mask_BT)
    return Advantages(advantage_BT, base_BT, return_BT, per_response)


def _base(
    row: Algorithm, batch: Batch, settings: Mapping[str, Any], custom: Callable | None
) -> tuple[Tensor, Tensor | None]:
    """The row's own advantage, [B] or [B, T], and the critic's targets if the row makes them."""
    function = custom or resolve(row.advantage, "advantages")
    if settings["disable_rewards_normalization"] and custom is None:
        function = advantages.raw_reward
    known = _columns(inputs(function), batch, settings)
    found = function(*known, **knobs(function, _renamed(settings)))
    base, return_BT = found if isinstance(found, tuple) else (found, None)
    if custom is not None:
        base = _checked(base, batch["mask_BT"])
    return base, return_BT


def _renamed(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings, with that of std_normalization under the name of the argument it sets."""
    return {**settings, "std_normalization": not settings["disable_grpo_std_normalization"]}


def _columns(names: list[str], batch: Batch, settings: Mapping[str, Any]) -> list[Tensor]:
    """The tensors that an advantage function takes, by the names of its parameters."""
    made: dict[str, Callable[[], Tensor]] = {
        "kl_BT": lambda: reward_kl(batch, settings),
        "token_reward_BT": lambda: advantages.token_rewards(
            batch["reward_B"],
            reward_kl(batch, settings) if settings["kl_coef"] else None,
            batch["mask_BT"],
            kl_coef=settings["kl_coef"],
        ),
    }
    return [made[name]() if name in made else batch[name] for name in names]


def reward_kl(batch: Batch, settings: Mapping[str, Any]) -> Tensor:
    """k1 of the KL in the reward: old_logp - ref_logp, or rollout_logp in old_logp's place."""
    old = "rollout_logp_BT" if settings["use_rollout_logprobs"] else "old_logp_BT"
    valid_BT = batch["mask_BT"] != 0
    old_BT, ref_BT = (
        torch.where(valid_BT, batch[name], 0.0).double() for name in (old, "ref_logp_BT")
    )
    return old_BT - ref_BT


def _checked(base: Tensor, mask_BT: Tensor) -> Tensor:
    """A custom advantage in float32, 0 outside the mask; ValueError for a wrong shape or value."""
    shapes = (mask_BT.shape[:1], mask_BT.shape)
    if not isinstance(base, Tensor) or base.shape not in shapes:
        found = tuple(base.shape) if isinstance(base, Tensor) else type(base).__name__
        raise ValueError(f"custom advantage: gave {found}; a tensor of shape B or B, T is needed")
    base = base.detach().float()
    if base.ndim == 2:
        base = torch.where(mask_BT != 0, base, 0.0)
    if not torch.isfinite(base).all():
        raise ValueError("custom advantage: not finite where the mask is on; mend the function")
    return base


def complete_groups(group_id_B: Tensor, size: int) -> Tensor:
    """Whether the group of each response has `size` responses, bool [B]."""
    _, group_B, count_G = torch.unique(group_id_B, return_inverse=True, return_counts=True)
    return count_G[group_B] == size
