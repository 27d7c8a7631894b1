"""One row an algorithm. A row names functions of the modules beside it and says what it asks.

Nothing else in the project asks for an algorithm by its name. Importing this loads no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Algorithm:
    """A row: what the algorithm called `name` is made of, what it uses and what it cannot have.

    Functions are given by name, in the module said, or as "package.module:function".
    """

    name: str
    paper: str
    advantage: str
    """Function of relax.algorithms.advantages."""
    objective: str
    """Function of relax.algorithms.objectives."""
    reduction: str
    """Function of relax.algorithms.reduce, unless calculate_per_token_loss is given."""
    kl_types: tuple[str, ...]
    """KL estimators that kl_loss_type may name; the first is the row's own."""
    needs: frozenset[str]
    """What it asks of the run: groups, one_update, critic, whole_responses."""
    uses: frozenset[str]
    """Those of KNOBS that have an effect with it."""
    whitening: str = "whiten_unbiased"
    """Function of relax.algorithms.advantages that normalize_advantages stands for."""
    bounds: str = ""
    """Function of relax.algorithms.objectives that finds clip bounds over a whole step."""
    value_objective: str = ""
    """Function of relax.algorithms.objectives for the critic."""
    required: Mapping[str, str] = field(default_factory=dict)
    """Settings that must be on, or above 0, and why."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """Settings that must stay as they are by default, and why."""

    @property
    def kl(self) -> str:
        """KL estimator that kl_loss_type stands for when it is unset."""
        return self.kl_types[0]


LOSS_KL = ("k3", "low_var_kl", "k2")
IN_LOSS = frozenset({"use_kl_loss", "kl_loss_coef", "use_unbiased_kl"})
CLIP = frozenset({"eps_clip", "eps_clip_high"})
DUAL_CLIP = CLIP | {"eps_clip_c"}
GROUP_SCALE = frozenset({"disable_grpo_std_normalization", "disable_rewards_normalization"})
GROUPS = frozenset({"groups"})

STALE = "its objective has no importance ratio that would correct stale responses"
WHOLE_GROUPS = "it is defined over whole, fixed-size batches of synchronous rollouts"
ASYNC_WHITENING = "its whitening needs the whole rollout at once"

ROWS = (
    Algorithm(
        name="grpo",
        paper="arXiv:2402.03300",
        advantage="group_normalized",
        objective="ppo_clip",
        reduction="response_mean_weights",
        kl_types=LOSS_KL,
        needs=GROUPS,
        uses=DUAL_CLIP | GROUP_SCALE | IN_LOSS,
    ),
    Algorithm(
        name="dr_grpo",
        paper="arXiv:2503.20783",
        advantage="group_centered",
        objective="ppo_clip",
        reduction="constant_weights",
        kl_types=LOSS_KL,
        needs=GROUPS,
        uses=DUAL_CLIP | IN_LOSS,
        whitening="",
        refused={
            "calculate_per_token_loss": "its weight is the constant 1 / (B * L_max); a mean over "
            "the tokens that happen to be there brings back the length bias that it removes",
            "normalize_advantages": "dividing by a deviation brings back the bias that it removes",
            "disable_rewards_normalization": "the group's mean is its baseline",
        },
    ),
    Algorithm(
        name="rloo",
        paper="arXiv:2402.14740",
        advantage="leave_one_out",
        objective="reinforce",
        reduction="token_mean_weights",
        kl_types=LOSS_KL,
        needs=GROUPS | {"one_update"},
        uses=IN_LOSS,
        whitening="",
        required={
            "calculate_per_token_loss": "a mean per response would weigh responses of unequal "
            "length by 1 / T_i",
        },
        refused={
            "kl_coef": "it has no KL in the reward; use_kl_loss with kl_loss_coef is the KL it has",
            "max_staleness": STALE,
            "disable_rewards_normalization": "the leave-one-out baseline is made there",
            "normalize_advantages": "whitening changes what leave-one-out means and makes it "
            "depend on what else is in the rollout",
            "fully_async": WHOLE_GROUPS,
            "hybrid": WHOLE_GROUPS,
            "partial_rollout": WHOLE_GROUPS,
            "use_dynamic_global_batch_size": WHOLE_GROUPS,
            "drop_incomplete_groups": WHOLE_GROUPS,
        },
    ),
    Algorithm(
        name="ppo",
        paper="arXiv:1707.06347",
        advantage="gae",
        objective="ppo_clip",
        reduction="response_mean_weights",
        kl_types=("k1",),
        needs=frozenset({"critic"}),
        uses=DUAL_CLIP
        | {"gamma", "lambd", "value_clip", "num_critic_only_steps", "critic_lr", "critic_load"}
        | {"kl_coef"},
        value_objective="value_clip",
        refused={
            "fully_async": "actor, critic and advantages take turns on one rollout",
            "hybrid": "actor, critic and advantages take turns on one rollout",
            "max_staleness": "the critic's values must belong to the policy that sampled",
            "use_kl_loss": "its KL is the one in the reward: kl_coef",
            "custom_advantage_path": "the critic learns from returns that belong to its advantages",
        },
    ),
    Algorithm(
        name="cispo",
        paper="arXiv:2506.13585",
        advantage="group_normalized",
        objective="cispo",
        reduction="token_mean_weights",
        kl_types=LOSS_KL,
        needs=GROUPS,
        uses=CLIP | GROUP_SCALE | IN_LOSS,
    ),
    Algorithm(
        name="gspo",
        paper="arXiv:2507.18071",
        advantage="group_normalized",
        objective="gspo",
        reduction="response_mean_weights",
        kl_types=LOSS_KL,
        needs=GROUPS | {"whole_responses"},
        uses=CLIP | GROUP_SCALE | IN_LOSS,
    ),
    Algorithm(
        name="sapo",
        paper="arXiv:2511.20347",
        advantage="group_normalized",
        objective="sapo",
        reduction="response_mean_weights",
        kl_types=LOSS_KL,
        needs=GROUPS,
        uses=frozenset({"sapo_tau_pos", "sapo_tau_neg"}) | GROUP_SCALE | IN_LOSS,
    ),
    Algorithm(
        name="m2po",
        paper="arXiv:2510.01161",
        advantage="group_normalized",
        objective="m2po",
        reduction="response_mean_weights",
        kl_types=LOSS_KL,
        needs=GROUPS,
        uses=frozenset({"m2po_kl2_budget", "m2po_miniclip_low", "m2po_miniclip_high"})
        | GROUP_SCALE
        | IN_LOSS,
        bounds="m2po_bounds",
    ),
    Algorithm(
        name="reinforce_plus_plus",
        paper="arXiv:2501.03262",
        advantage="kl_to_go_return",
        objective="ppo_clip",
        reduction="response_mean_weights",
        kl_types=("k1",),
        needs=frozenset(),
        uses=DUAL_CLIP | {"gamma", "kl_coef"},
        whitening="whiten_tokens",
        required={
            "normalize_advantages": "its advantage is the whitened return",
            "kl_coef": "its return is a KL-to-go: the KL is part of the reward",
        },
        refused={
            "use_kl_loss": "its KL is the one in the reward",
            "fully_async": ASYNC_WHITENING,
            "hybrid": ASYNC_WHITENING,
            "calculate_per_token_loss": "its loss is a mean per response",
        },
    ),
    Algorithm(
        name="reinforce_plus_plus_baseline",
        paper="arXiv:2501.03262",
        advantage="group_centered",
        objective="ppo_clip",
        reduction="response_mean_weights",
        kl_types=("k2",),
        needs=GROUPS,
        uses=DUAL_CLIP | {"use_kl_loss", "kl_loss_coef"},
        whitening="whiten_tokens",
        required={
            "normalize_advantages": "its advantage is the whitened, centred reward",
            "use_kl_loss": "its KL is a k2 loss of its own",
            "kl_loss_coef": "its KL is a k2 loss of its own",
        },
        refused={
            "fully_async": ASYNC_WHITENING,
            "hybrid": ASYNC_WHITENING,
            "calculate_per_token_loss": "its loss is a mean per response",
            "kl_coef": "its KL is in the loss, not in the reward",
            "use_unbiased_kl": "its KL loss is the plain k2",
            "disable_rewards_normalization": "the group's mean is its baseline",
            "custom_reward_post_process_path": "the group's mean is its baseline",
        },
    ),
)

ALGORITHMS: dict[str, Algorithm] = {row.name: row for row in ROWS}

OBJECTIVE_KNOBS = DUAL_CLIP | {
    *("sapo_tau_pos", "sapo_tau_neg"),
    *("m2po_kl2_budget", "m2po_miniclip_low", "m2po_miniclip_high"),
}
CUSTOM_KNOBS: dict[str, frozenset[str]] = {
    "custom_loss_path": OBJECTIVE_KNOBS,
    "custom_advantage_path": frozenset({"gamma", "lambd"}),
}
"""Settings that a function of the user's own may take whatever the row."""

KNOBS: frozenset[str] = frozenset[str]().union(*(row.uses for row in ROWS))
"""Settings that have an effect with some rows only."""
