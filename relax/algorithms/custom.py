"""Functions of the user's own that take the place of ours: the settings that name them, and what
each must take. Loading them is the business of relax.custom; importing this loads no torch.

An advantage or a loss may have further parameters with defaults: those named like a setting of
[algorithm] get its value. Shapes: B responses, T response positions (right-padded).
"""

from __future__ import annotations

CUSTOM_FUNCTIONS: dict[str, tuple[str, ...]] = {
    "custom_advantage_path": ("reward_B", "group_id_B", "mask_BT"),
    "custom_loss_path": ("logp_BT", "old_logp_BT", "advantage_BT", "mask_BT"),
    "custom_reward_post_process_path": ("reward_B", "group_id_B"),
}
"""Setting -> the leading parameters of the function it names.

custom_advantage_path: -> advantage_B, or advantage_BT where tokens differ; finite.
custom_loss_path: an objective, -> (loss_BT, clipped_BT), differentiable in logp_BT.
custom_reward_post_process_path: -> reward_B, what advantages are made of.
"""
