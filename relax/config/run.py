"""Settings of the run itself: where it is, what it reads, what it reports."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from relax.config.fields import (
    NonNegative,
    NonNegativeInt,
    Positive,
    PositiveInt,
    Section,
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
    async_save: bool = unkeyed(False)
    """Write a checkpoint while the policy is published, from a copy of the state in host memory."""
    accept_drift: bool = unkeyed(False)
    """Go on where a redone update gives another policy than was published (on another kind of
    machine, or with other libraries or ranks); manifests of what is made from it note the drift."""
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


def _plain_name(value: str) -> str:
    if not re.fullmatch(r"[\w.-]+", value):
        raise ValueError("only letters, digits, `_`, `.` and `-` may be in it")
    return value


class EvaluateSection(Section):
    """Evaluation on held-out prompts (same keys and template as the training prompts)."""

    eval_prompt_data: str = unkeyed("")
    """Held-out prompts; empty: no evaluation."""
    eval_name: Annotated[str, AfterValidator(_plain_name)] = "held_out"
    """Name of the evaluation in metrics, eval/NAME/...: letters, digits, `_`, `.` and `-`."""
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
    """Log the metrics of each step, and of each evaluation, to wandb."""
    wandb_mode: Literal["online", "offline"] = unkeyed("online")
    """`offline` needs no account: the log lies in the run directory."""
    wandb_project: str = unkeyed("relax")
    """Project of the wandb run."""
    wandb_name: str = unkeyed("")
    """Name of the wandb run; empty: that of the run directory."""
    wandb_samples_interval: NonNegativeInt = unkeyed(20)
    """Log a table of samples every this many steps; 0: never."""
