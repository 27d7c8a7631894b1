"""The trainer's knobs: one frozen record, under the settings' own names."""

from dataclasses import dataclass
from typing import Literal

Decay = Literal["constant", "linear", "cosine"]
Dtype = Literal["float32", "bfloat16"]
ComputeDtype = Literal["float32", "bfloat16", "float64"]


@dataclass(frozen=True)
class TrainerOptions:
    """Everything that an actor or critic is told about how to train.

    Bounds are the configuration's business (relax.config.training).
    lr, min_lr: peak and final learning rate; lr_warmup_iters: optimizer steps of linear warm-up.
    clip_grad: largest global gradient norm (0: no clipping). weight_decay applies to matrices.
    temperature: logits are divided by it, as they were when the responses were sampled.
    max_tokens_per_gpu: tokens of one micro-batch; micro_batch_size: sequences of one micro-batch
    instead (0: use max_tokens_per_gpu).
    dtype: of the computation; parameters and gradients are float32 master copies either way.
    float64 is for proofs on a CPU: parameters, gradients and optimizer state are float64 then too.
    sampling_dtype: of the published weights and of their hash.
    num_replicas: groups of ranks that each hold the whole model between them (usually one a node);
    the ranks must be a multiple of it.
    recompute_every: activations of every n-th block are computed again in the backward pass
    instead of kept (0: all are kept, 1: none).
    offload: "cpu" keeps parameters, gradients and optimizer state in host memory.
    compile_blocks: run each transformer block through torch.compile.
    attention: "flash_attention_2" needs a CUDA device and the flash-attn package.
    only_train_params_name_list, freeze_params_name_list: regular expressions searched in parameter
    names; at most one of the two lists is given.
    """

    lr: float = 1e-6
    weight_decay: float = 0.0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.95
    adam_eps: float = 1e-8
    clip_grad: float = 1.0
    lr_decay_style: Decay = "constant"
    lr_warmup_iters: int = 0
    min_lr: float = 0.0
    temperature: float = 1.0
    max_tokens_per_gpu: int = 8192
    micro_batch_size: int = 0
    dtype: ComputeDtype = "float32"
    sampling_dtype: Dtype = "float32"
    num_replicas: int = 1
    recompute_every: int = 0
    offload: Literal["none", "cpu"] = "none"
    compile_blocks: bool = False
    attention: Literal["sdpa", "flash_attention_2"] = "sdpa"
    only_train_params_name_list: tuple[str, ...] = ()
    freeze_params_name_list: tuple[str, ...] = ()
