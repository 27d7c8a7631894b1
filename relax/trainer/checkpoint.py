"""The trainer's state on disk: torch.distributed.checkpoint, resharded on load."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save


def training_state(
    weights: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer, step: int
) -> dict[str, Any]:
    """Everything that the next step depends on, by name; the tensors are the live ones."""
    return {
        "model": {name: weight.detach() for name, weight in weights.items()},
        "optimizer": {name: dict(optimizer.state[weight]) for name, weight in weights.items()},
        "step": torch.tensor(step),
    }


def write(state: dict[str, Any], directory: Path) -> None:
    """Write the state; every rank writes its shards."""
    save(state, checkpoint_id=directory)


def read(state: dict[str, Any], directory: Path) -> int:
    """Fill the live tensors of the state from a directory and return its step."""
    load(state, checkpoint_id=directory)
    return int(state["step"])
