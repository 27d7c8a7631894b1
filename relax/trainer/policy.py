"""A causal language model as the trainer sees it: decoder, head, and nothing of the logits.

Shapes: R rows, L row positions, N response tokens, H hidden size, V vocabulary.
"""

from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from relax.errors import ConfigError
from relax.trainer.logprob import linear_logp


class LogpHead(nn.Module):
    """The language-model head; its forward gives log-probabilities instead of logits."""

    def __init__(self, weight_VH: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight_VH

    def forward(
        self, hidden_NH: Tensor, target_N: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        """logp_N of the targets and entropy_N."""
        return linear_logp(hidden_NH, self.weight, target_N, temperature)


class Policy(nn.Module):
    """Decoder and head of a Hugging Face model; forward gives logp_N and entropy_N.

    Dropout stays off: the ratio of two log-probabilities must not depend on a coin.
    """

    def __init__(self, decoder: PreTrainedModel, head: LogpHead, names: dict[str, str]) -> None:
        super().__init__()
        self.decoder = decoder
        self.head = head
        self.names = names
        self.eval()

    def forward(
        self,
        token_RL: Tensor,
        position_RL: Tensor,
        source_N: Tensor,
        target_N: Tensor,
        temperature: float,
    ) -> tuple[Tensor, Tensor]:
        """Log-probability and entropy (float32, nats) where source_N predicts target_N."""
        hidden_RLH = self.decoder(
            input_ids=token_RL, position_ids=position_RL, attention_mask=None, use_cache=False
        ).last_hidden_state
        hidden_NH = hidden_RLH.flatten(0, 1)[source_N]
        return self.head(hidden_NH, target_N, temperature)

    def blocks(self) -> list[nn.Module]:
        """The transformer blocks in order."""
        kinds = set(self.decoder._no_split_modules or ())
        return [module for module in self.decoder.modules() if type(module).__name__ in kinds]

    def named_weights(self) -> dict[str, nn.Parameter]:
        """Parameters under their Hugging Face names, sorted; a tied head appears once."""
        weights = {self.names[name]: weight for name, weight in self.named_parameters()}
        return dict(sorted(weights.items()))


def load_policy(model_dir: Path) -> tuple[Policy, PreTrainedConfig]:
    """Read a Hugging Face model directory into float32 master weights."""
    model = AutoModelForCausalLM.from_pretrained(
        model_dir, dtype=torch.float32, attn_implementation="sdpa", local_files_only=True
    )
    head = known_head(model_dir, model)
    decoder = cast(PreTrainedModel, model.base_model)
    prefix = model.base_model_prefix
    names = {f"decoder.{name}": f"{prefix}.{name}" for name, _ in decoder.named_parameters()}
    names["head.weight"] = "lm_head.weight"
    return Policy(decoder, LogpHead(cast(nn.Parameter, head.weight)), names), model.config


def known_head(model_dir: Path, model: PreTrainedModel) -> nn.Linear:
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


def shard(policy: Policy, mesh: DeviceMesh, dtype: torch.dtype) -> None:
    """fully_shard every block, the head unless tied, and the rest; gradients are summed.

    FSDP2 averages gradients by default; the losses here carry the whole step's denominators, so
    that the ranks' gradients add up.
    """
    precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    tied = policy.head.weight is policy.decoder.get_input_embeddings().weight
    for block in policy.blocks():
        fully_shard(block, mesh=mesh, mp_policy=precision)
    if not tied:
        fully_shard(policy.head, mesh=mesh, mp_policy=precision, reshard_after_forward=False)
    fully_shard(policy, mesh=mesh, mp_policy=precision)
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
