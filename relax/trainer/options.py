"""The trainer's knobs: one frozen record, checked where it is made."""

from dataclasses import dataclass
from typing import Literal

from relax.errors import ConfigError

Decay = Literal["constant", "linear", "cosine"]
Dtype = Literal["float32", "bfloat16"]
ComputeDtype = Literal["float32", "bfloat16", "float64"]


FLAGS = {
    "lr_warmup_steps": "lr_warmup_iters",
    "replicate": "num_replicas",
    "temperature": "rollout_temperature",
    "only_train_params": "only_train_params_name_list",
    "freeze_params": "freeze_params_name_list",
}
"""Settings that are called otherwise on the command line."""


@dataclass(frozen=True)
class TrainerOptions:
    """Everything that an actor or critic is told about how to train.

    lr, min_lr: peak and final learning rate; lr_warmup_steps: optimizer steps of linear warm-up.
    clip_grad: largest global gradient norm (0: no clipping). weight_decay applies to matrices.
    temperature: logits are divided by it, as they were when the responses were sampled.
    max_tokens_per_gpu: tokens of one micro-batch; micro_batch_size: sequences of one micro-batch
    instead (0: use max_tokens_per_gpu).
    dtype: of the computation; parameters and gradients are float32 master copies either way.
    float64 is for proofs on a CPU: parameters, gradients and optimizer state are float64 then too.
    sampling_dtype: of the published weights and of their hash.
    replicate: groups of ranks that each hold the whole model between them (usually one a node);
    the ranks must be a multiple of it.
    recompute_every: activations of every n-th block are computed again in the backward pass
    instead of kept (0: all are kept, 1: none).
    offload: "cpu" keeps parameters, gradients and optimizer state in host memory.
    compiled: "blocks" runs each transformer block through torch.compile.
    attention: "flash_attention_2" needs a CUDA device and the flash-attn package.
    only_train_params, freeze_params: regular expressions searched in parameter names; at most one
    of the two lists is given.
    """

    lr: float = 1e-6
    weight_decay: float = 0.0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.95
    adam_eps: float = 1e-8
    clip_grad: float = 1.0
    lr_decay_style: Decay = "constant"
    lr_warmup_steps: int = 0
    min_lr: float = 0.0
    temperature: float = 1.0
    max_tokens_per_gpu: int = 16384
    micro_batch_size: int = 0
    seed: int = 0
    dtype: ComputeDtype = "float32"
    sampling_dtype: Dtype = "float32"
    replicate: int = 1
    recompute_every: int = 0
    offload: Literal["none", "cpu"] = "none"
    compiled: Literal["none", "blocks"] = "none"
    attention: Literal["sdpa", "flash_attention_2"] = "sdpa"
    only_train_params: tuple[str, ...] = ()
    freeze_params: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Refuse what no trainer can do; one line, naming the flag."""
        for name in ("lr", "temperature", "adam_eps"):
            self._check(name, getattr(self, name) > 0, "greater than 0")
        for name in ("adam_beta1", "adam_beta2"):
            self._check(name, 0 <= getattr(self, name) < 1, "at least 0 and below 1")
        for name in ("weight_decay", "clip_grad", "min_lr", "lr_warmup_steps"):
            self._check(name, getattr(self, name) >= 0, "0 or more")
        for name in ("micro_batch_size", "recompute_every"):
            self._check(name, getattr(self, name) >= 0, "0 or more")
        for name in ("max_tokens_per_gpu", "replicate"):
            self._check(name, getattr(self, name) >= 1, "1 or more")
        alone = not (self.only_train_params and self.freeze_params)
        self._check("freeze_params", alone, "empty where --only-train-params-name-list is given")

    def _check(self, name: str, holds: bool, allowed: str) -> None:
        if not holds:
            flag = "--" + FLAGS.get(name, name).replace("_", "-")
            raise ConfigError(f"{flag} = {getattr(self, name)}; must be {allowed}")
