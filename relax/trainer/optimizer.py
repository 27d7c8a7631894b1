"""AdamW over sharded parameters, with its state made at once so that it can be restored into."""

from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from relax.trainer.options import TrainerOptions


def make_adamw(weights: Mapping[str, nn.Parameter], options: TrainerOptions) -> torch.optim.AdamW:
    """AdamW with decay on matrices only; moments exist from the start, on each rank its shard."""
    matrices = [weight for weight in weights.values() if weight.ndim >= 2]
    vectors = [weight for weight in weights.values() if weight.ndim < 2]
    optimizer = torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": options.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ],
        lr=options.lr,
        betas=(options.adam_beta1, options.adam_beta2),
        eps=options.adam_eps,
        fused=True,
    )
    for weight in weights.values():
        optimizer.state[weight] = {
            "step": torch.zeros((), dtype=torch.float32, device=weight.device),
            "exp_avg": torch.zeros_like(weight, requires_grad=False),
            "exp_avg_sq": torch.zeros_like(weight, requires_grad=False),
        }
    return optimizer


def gradient_norm(weights: Iterable[nn.Parameter]) -> float:
    """Global 2-norm of the gradients in float64; replicas of a shard count once."""
    gradients = [weight.grad for weight in weights if weight.grad is not None]
    parts = [torch.linalg.vector_norm(_local(one), dtype=torch.float64) for one in gradients]
    square = torch.stack(parts).square().sum()
    sharded = next(one for one in gradients if isinstance(one, DTensor))
    mesh = sharded.device_mesh
    for dimension, placement in enumerate(sharded.placements):
        if isinstance(placement, Shard) and mesh.size(dimension) > 1:
            dist.all_reduce(square, group=mesh.get_group(dimension))
    return square.sqrt().item()


def clip(weights: Iterable[nn.Parameter], norm: float, largest: float) -> None:
    """Scale the gradients in place so that their global norm is at most `largest`."""
    if norm > largest:
        for weight in weights:
            if weight.grad is not None:
                _local(weight.grad).mul_(largest / (norm + 1e-6))


def _local(tensor: Tensor) -> Tensor:
    """The shard of a DTensor that lies here; an ordinary tensor is its own."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
