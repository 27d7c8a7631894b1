"""From a model directory to a sharded module; no rank ever holds the whole model."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Literal, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from relax.errors import ConfigError
from relax.model_dir import read_config
from relax.trainer import attention
from relax.trainer.heads import LogpHead, SequenceModel, ValueHead
from relax.trainer.model_files import ModelFiles
from relax.trainer.options import TrainerOptions

HeadKind = Literal["logp", "value"]
Use = Literal["train", "restore", "score"]
"""What a model is built for: to be trained from its files; to be filled from a checkpoint, so that
its files are not read; to be scored with, without master weights."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


def build(
    model_dir: Path, options: TrainerOptions, head: HeadKind, mesh: DeviceMesh, use: Use
) -> SequenceModel:
    """Construct without memory, freeze, shard, then read each rank's rows from the files."""
    dtype = DTYPES[options.dtype] if use == "score" else master_dtype(options)
    model = construct(model_dir, options, head, dtype)
    if use == "score":
        model.requires_grad_(False)
    else:
        freeze(model.named_weights(), options)
    for number, block in enumerate(model.blocks()):
        if options.recompute_every and number % options.recompute_every == 0:
            # Inside the block's FSDP hooks, so that the parameters are there for the second pass.
            block.forward = partial(
                checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False
            )
        if options.compile_blocks:
            block.compile()
    shard(model, mesh, options)
    parameter_device = "cpu" if options.offload == "cpu" else mesh.device_type
    materialize(model, parameter_device, buffer_device=mesh.device_type)
    if use != "restore":
        read_weights(model.named_weights(), ModelFiles(model_dir))
    return model


def construct(
    model_dir: Path, options: TrainerOptions, head: HeadKind, dtype: torch.dtype
) -> SequenceModel:
    """The module with parameters on the meta device and its buffers (rotary tables) computed.

    dtype: what parameters are kept in.
    """
    read_config(model_dir)
    config = AutoConfig.from_pretrained(model_dir, local_files_only=True)
    kernel: str = options.attention
    if kernel == "sdpa" and attention.is_plain(config):
        kernel = attention.NAME
    with parameters_on_meta():
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=kernel)
        value_head = ValueHead(config.hidden_size, dtype)
    decoder = cast(PreTrainedModel, model.base_model)
    _refuse_persistent_buffers(model_dir, decoder)
    if head == "value":
        return SequenceModel(decoder, value_head)
    linear = _known_head(model_dir, model)
    whole = SequenceModel(decoder, LogpHead(cast(nn.Parameter, linear.weight)))
    if config.tie_word_embeddings:
        whole.tie()
    return whole


def master_dtype(options: TrainerOptions) -> torch.dtype:
    """What parameters, gradients and moments are kept in: float32, or what computes if wider."""
    return torch.promote_types(DTYPES[options.dtype], torch.float32)


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Every parameter registered inside keeps its shape and gives up its memory."""
    register = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:
            param = nn.Parameter(param.to("meta"), requires_grad=param.requires_grad)
        register(module, name, param)

    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register


def _known_head(model_dir: Path, model: PreTrainedModel) -> nn.Linear:
    """The head, unless it does more than hidden @ weight.T: that would be another distribution."""
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear) or head.bias is not None:
        raise ConfigError(f"model {model_dir}: its head is {head}; allowed: a linear without bias")
    for name in ("final_logit_softcapping", "logits_scaling", "logit_scale"):
        value = model.config.to_dict().get(name)
        if value not in (None, 1, 1.0):
            raise ConfigError(
                f"model {model_dir}: {name} = {value}; not supported: train a model whose logits "
                "are hidden @ weight.T"
            )
    return head


def rotary_limit(config: PreTrainedConfig) -> int | None:
    """Longest sequence whose rotary angles its neighbours do not change; None: any.

    transformers takes the angles of all sequences of a batch from the longest, where the scaling
    depends on the length.
    """
    given = getattr(config, "rope_parameters", None) or {}
    tables = [table for table in given.values() if isinstance(table, dict)] or [given]
    limits = [
        table.get("original_max_position_embeddings") or config.max_position_embeddings
        for table in tables
        if table.get("rope_type") in ("dynamic", "longrope")
    ]
    return min(limits, default=None)


def _refuse_persistent_buffers(model_dir: Path, decoder: PreTrainedModel) -> None:
    saved = set(decoder.state_dict()) - {
        name for name, _ in decoder.named_parameters(remove_duplicate=False)
    }
    if saved:
        raise ConfigError(
            f"model {model_dir}: it keeps {min(saved)} as a buffer; not supported: the optimizer "
            "and the published files hold parameters only"
        )


def freeze(weights: Mapping[str, nn.Parameter], options: TrainerOptions) -> None:
    """Take the gradient from parameters by name pattern; a pattern must match something."""
    only, frozen = options.only_train_params_name_list, options.freeze_params_name_list
    for flag, patterns in (
        ("--only-train-params-name-list", only),
        ("--freeze-params-name-list", frozen),
    ):
        for pattern in patterns:
            if not any(re.search(pattern, name) for name in weights):
                raise ConfigError(
                    f"{flag} = {pattern!r} matches no parameter; names look like "
                    f"{next(iter(weights))}"
                )
    for name, weight in weights.items():
        named = any(re.search(pattern, name) for pattern in only or frozen)
        weight.requires_grad_(named if only else not named)
    if not any(weight.requires_grad for weight in weights.values()):
        raise ConfigError(
            "--freeze-params-name-list leaves no parameter to train; remove a pattern"
        )


def shard(model: SequenceModel, mesh: DeviceMesh, options: TrainerOptions) -> None:
    """fully_shard every block, the head unless tied, and the rest; gradients are summed.

    FSDP2 averages gradients by default; the losses here carry the whole step's denominators, so
    that the ranks' gradients add up.
    """
    precision = MixedPrecisionPolicy(
        param_dtype=DTYPES[options.dtype], reduce_dtype=master_dtype(options)
    )
    offload = OffloadPolicy()
    if options.offload == "cpu":
        offload = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda")
    together = partial(fully_shard, mesh=mesh, mp_policy=precision, offload_policy=offload)
    for block in model.blocks():
        together(block)
    if not model.is_tied:
        # The backward pass begins with the head: gathering it again would be waste.
        together(model.head, reshard_after_forward=False)
    together(model)
    for module in fsdp_modules(model):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)


def fsdp_modules(model: nn.Module) -> list[FSDPModule]:
    """The modules that gather and scatter parameters of their own."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def materialize(model: SequenceModel, parameter_device: str, *, buffer_device: str) -> None:
    """Give the sharded parameters memory; buffers keep their values, a tied head its tie."""
    tied = model.is_tied
    buffers = [
        (module, name, buffer)
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    model.to_empty(device=parameter_device)
    for module, name, buffer in buffers:
        module._buffers[name] = buffer.to(buffer_device)
    if tied:
        model.tie()


def read_weights(weights: Mapping[str, nn.Parameter], files: ModelFiles) -> None:
    """Copy this rank's rows of every parameter from the files.

    A value head that the files lack starts at zero: a policy becomes a critic.
    """
    with torch.no_grad():
        for name, weight in weights.items():
            part = _local_part(weight)
            if name == ValueHead.hf_name and name not in files.names():
                part.zero_()
                continue
            start = 0
            if isinstance(weight, DTensor):
                _, offsets = compute_local_shape_and_global_offset(
                    weight.shape, weight.device_mesh, weight.placements
                )
                start = offsets[0]
            if len(part):
                part.copy_(files.rows(name, weight.shape, start, len(part)))


def _local_part(weight: Tensor) -> Tensor:
    return weight.to_local() if isinstance(weight, DTensor) else weight
