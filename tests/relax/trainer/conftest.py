"""A small Qwen3 model on disk and made-up sequences for the trainer's tests."""

import os
import sys
from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from relax.trainer.numerics import make_deterministic

# What tests share with the processes that they start lies beside them, the rest above.
sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parent))
os.environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)


def write_model(directory: Path, *, tie: bool, layers: int = 2, window: int = 0) -> Path:
    torch.manual_seed(5)
    config = Qwen3Config(
        vocab_size=61, hidden_size=32, intermediate_size=64, num_hidden_layers=layers,
        num_attention_heads=2, num_key_value_heads=1, head_dim=16, tie_word_embeddings=tie,
        initializer_range=0.2, use_sliding_window=window > 0, sliding_window=window or None,
        max_window_layers=1,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(directory)
    return directory


@pytest.fixture(scope="session", autouse=True)
def deterministic():
    make_deterministic(1)


@pytest.fixture(scope="session")
def tied_dir(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("models") / "tied", tie=True)


@pytest.fixture(scope="session")
def untied_dir(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("models") / "untied", tie=False)


@pytest.fixture(scope="session")
def window_dir(tmp_path_factory):
    """A second layer that sees four tokens: not plain causal attention."""
    return write_model(tmp_path_factory.mktemp("models") / "window", tie=False, window=4)
