"""Settings of the algorithm and of the optimizer step."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from relax.config.fields import (
    Finite,
    Fraction,
    NonNegative,
    NonNegativeInt,
    Positive,
    PositiveInt,
    Section,
    Strings,
    unkeyed,
)


class AlgorithmSection(Section):
    """The algorithm (shared by the stages score, advantage and update)."""

    advantage_estimator: str = "grpo"
    """Algorithm, by its name in the table of algorithms."""
    normalize_advantages: bool = False
    """Whiten advantages over the valid tokens of the whole rollout."""
    disable_grpo_std_normalization: bool = False
    """Centre rewards by group without dividing by their standard deviation."""
    disable_rewards_normalization: bool = False
    """Use raw rewards in place of group-relative ones."""
    calculate_per_token_loss: bool = False
    """Average the loss over all tokens of the step instead of the algorithm's own reduction."""
    gamma: Fraction = 1.0
    """Discount factor."""
    lambd: Fraction = 1.0
    """GAE lambda."""
    eps_clip: NonNegative = 0.2
    """Lower clip margin: the ratio is kept above 1 - eps_clip."""
    eps_clip_high: NonNegative | None = None
    """Upper clip margin; unset: the same as eps_clip."""
    eps_clip_c: Finite | None = None
    """Dual clip: cap of the loss of negative advantages, over 1; unset: off."""
    value_clip: Positive = 0.2
    """Clip range of the critic's value."""
    num_critic_only_steps: NonNegativeInt = 0
    """Rollouts that train the critic alone at the start."""
    entropy_coef: Finite = 0.0
    """Entropy bonus."""
    use_kl_loss: bool = False
    """Compute the KL to the reference in the loss."""
    kl_loss_coef: NonNegative = 0.0
    """Weight of the KL in the loss."""
    kl_loss_type: Literal["k1", "k2", "k3", "low_var_kl"] | None = None
    """KL estimator in the loss; unset: the algorithm's own."""
    ref_update_interval: NonNegativeInt = 0
    """Make the newest policy the reference every this many steps; 0: never."""
    use_unbiased_kl: bool = False
    """Multiply the KL by the importance ratio."""
    kl_coef: NonNegative = 0.0
    """Weight of the KL in the reward."""
    sapo_tau_pos: Positive = 1.0
    """SAPO gate temperature for positive advantages."""
    sapo_tau_neg: Positive = 1.05
    """SAPO gate temperature for the other advantages."""
    m2po_kl2_budget: NonNegative = 0.01
    """M2PO second-moment budget per harmful token."""
    m2po_miniclip_low: Fraction = 0.3
    """M2PO floor of the lower clip margin."""
    m2po_miniclip_high: NonNegative = 0.5
    """M2PO floor of the upper clip margin."""
    use_tis: bool = False
    """Weight the policy gradient by the clamped ratio of trainer to engine probability."""
    use_icepop: bool = False
    """As use_tis, but tokens whose ratio is outside the band are dropped."""
    tis_clip_low: NonNegative = 0.0
    """Lower bound of that ratio."""
    tis_clip: Positive = 2.0
    """Upper bound of that ratio."""
    use_opsm: bool = False
    """Drop the tokens of responses with negative advantage that drifted beyond opsm_delta."""
    opsm_delta: Finite = 1e-4
    """Mean log-ratio at which use_opsm drops a response."""
    use_opd: bool = False
    """Distillation: take the gap of rollout to teacher log-probabilities off the advantage."""
    opd_kl_coef: NonNegative = 1.0
    """Weight of that gap."""
    opd_only_reward: bool = False
    """Distillation alone: the base advantage is set to 0 first."""
    opd_log_prob_top_k: NonNegativeInt = 0
    """Report the overlap of the k likeliest tokens of policy and teacher; 0: not."""
    use_rollout_logprobs: bool = False
    """Put the engine's log-probabilities in the place of the trainer's old ones."""
    true_on_policy_mode: bool = False
    """Take the update's own log-probabilities as the old ones (one optimizer step per rollout)."""
    drop_incomplete_groups: bool = False
    """Drop groups that lack samples instead of refusing them."""
    mask_truncated: bool = False
    """Leave the tokens of truncated responses out of the loss."""
    custom_advantage_path: str = unkeyed("")
    """Your own advantage (`module:function` or `file.py:function`)."""
    custom_loss_path: str = unkeyed("")
    """Your own objective (`module:function` or `file.py:function`)."""
    custom_reward_post_process_path: str = unkeyed("")
    """Your own change of rewards before advantages (`module:function` or `file.py:function`)."""


class UpdateSection(Section):
    """The optimizer step. Settings that only lay out its work (use_dynamic_batch_size,
    micro_batch_size, max_tokens_per_gpu, num_replicas, recompute_every, offload) may change in the
    middle of a run."""

    # They move last bits: each update's manifest has them, and a redo repeats them.

    lr: Positive = 1e-6
    """Peak learning rate."""
    min_lr: NonNegative = 0.0
    """Learning rate at the end of the decay."""
    lr_decay_style: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the learning rate after warm-up."""
    lr_warmup_iters: NonNegativeInt = 0
    """Optimizer steps of linear warm-up."""
    weight_decay: NonNegative = 0.0
    """AdamW weight decay."""
    critic_lr: Positive | None = None
    """Learning rate of the critic; unset: lr."""
    adam_beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """AdamW beta 1."""
    adam_beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    """AdamW beta 2."""
    adam_eps: Positive = 1e-8
    """AdamW epsilon."""
    clip_grad: NonNegative = 1.0
    """Gradient norm is clipped to this; 0: off."""
    global_batch_size: PositiveInt | None = None
    """Responses per optimizer step; unset: those of a rollout over num_steps_per_rollout."""
    num_steps_per_rollout: PositiveInt | None = None
    """Optimizer steps per rollout; unset: those of a rollout over global_batch_size, else 1."""
    use_dynamic_global_batch_size: bool = False
    """Not built yet. Let the responses of an optimizer step follow what a rollout brought."""
    use_dynamic_batch_size: bool = unkeyed(True)
    """Pack micro-batches by tokens, up to max_tokens_per_gpu; micro_batch_size turns it off."""
    micro_batch_size: NonNegativeInt = unkeyed(0)
    """Responses per micro-batch, where they are not packed by tokens."""
    max_tokens_per_gpu: PositiveInt = unkeyed(8192)
    """Token budget of a packed micro-batch; a sequence is never split."""
    update_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of the computation; auto: bfloat16 on GPUs, float32 elsewhere. Master weights: float32."""
    rollout_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of the published policies; auto as above."""
    num_replicas: PositiveInt = unkeyed(1)
    """Groups of ranks that hold the model between them; usually one group a node."""
    recompute_every: NonNegativeInt = unkeyed(0)
    """Recompute the activations of every n-th block in the backward pass; 0: keep all."""
    offload: Literal["none", "cpu"] = unkeyed("none")
    """`cpu` keeps parameters, gradients and optimizer state in host memory."""
    compile_blocks: bool = False
    """Run each transformer block through torch.compile."""
    attention: Literal["sdpa", "flash_attention_2"] = "sdpa"
    """Attention kernel; sdpa computes a prompt that several responses follow once (llama, mistral,
    phi3, qwen2, qwen3 and kin), flash_attention_2 needs a GPU and the package flash-attn."""
    only_train_params_name_list: Strings = ()
    """Regular expressions: only parameters whose name matches one are trained."""
    freeze_params_name_list: Strings = ()
    """Regular expressions: parameters whose name matches one are not trained."""
    skip_zero_advantage: bool = False
    """Leave responses out that move nothing; metrics over all tokens are then not reported, and
    the engine is compared on those that are left."""

    @model_validator(mode="before")
    @classmethod
    def _counted_where_a_count_is_given(cls, given: Any) -> Any:
        """micro_batch_size alone says enough."""
        if isinstance(given, dict) and given.get("micro_batch_size"):
            return {"use_dynamic_batch_size": False, **given}
        return given

    @model_validator(mode="after")
    def _fit_together(self) -> UpdateSection:
        if self.use_dynamic_batch_size == bool(self.micro_batch_size):
            raise ValueError(
                f"micro_batch_size = {self.micro_batch_size} with use_dynamic_batch_size = "
                f"{self.use_dynamic_batch_size}: micro-batches are packed by tokens, or hold a "
                "number of responses: give one of the two"
            )
        if self.only_train_params_name_list and self.freeze_params_name_list:
            raise ValueError(
                f"freeze_params_name_list = {list(self.freeze_params_name_list)} with "
                f"only_train_params_name_list = {list(self.only_train_params_name_list)}: give at "
                "most one of the two"
            )
        return self
