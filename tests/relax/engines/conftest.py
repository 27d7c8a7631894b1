"""Tiny random models in Hugging Face layout, one directory each."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast, set_seed

# What several folders of tests share.
sys.path.insert(0, str(Path(__file__).parents[2]))

EOS = 1
VOCAB_SIZE = 258


def save_tokenizer(directory: Path) -> None:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<pad>": 0, "<eos>": EOS} | {letter: i + 2 for i, letter in enumerate(letters)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>"
    ).save_pretrained(directory)


def save_model(directory: Path, model_type: str = "qwen3", seed: int = 0, **changes) -> Path:
    """A random model of hidden size 64 and two layers, its weights large enough to matter."""
    settings = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 256,
        "tie_word_embeddings": True,
        "pad_token_id": 0,
        "eos_token_id": EOS,
        "bos_token_id": None,
    }
    config = AutoConfig.for_model(model_type, **(settings | changes))
    set_seed(seed)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4.0)
    model.save_pretrained(directory)
    save_tokenizer(directory)
    return directory


@pytest.fixture(scope="session")
def make_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Save a tiny model in a directory of its own."""
    return lambda *args, **kwargs: save_model(tmp_path_factory.mktemp("policy"), *args, **kwargs)


@pytest.fixture(scope="session")
def tiny(make_model: Callable[..., Path]) -> Path:
    """The tiny Qwen3 with a tied head."""
    return make_model()
