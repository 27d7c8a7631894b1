"""Small made-up tasks, and a tiny model that learns them in a minute on a laptop."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from relax.data.order import permutation
from relax.errors import ConfigError
from relax.flags import nearest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PAD, EOS, UNK = "<pad>", "<eos>", "<unk>"
CHARACTERS = "0123456789abcdefghijklmnopqrstuvwxyz +-*/=<>()[]{}.,:?!'\"#$\\\n"
VOCABULARY = (PAD, EOS, UNK, *CHARACTERS)
# Content alone, and the end token after what the model itself said: enough for warm-up and chat.
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
)


def largest(digits: str) -> str:
    """Give the largest digit: "381" -> "8"."""
    return max(digits)


def ascending(digits: str) -> str:
    """Give the digits in ascending order: "381" -> "138"."""
    return "".join(sorted(digits))


TASKS: dict[str, Callable[[str], str]] = {
    "max3": largest,
    "sort3": ascending,
}


@dataclass(frozen=True, slots=True)
class TaskFiles:
    """JSONL files of a task, rows {"input": "381=", "label": "8"}."""

    train: Path
    held_out: Path


def write_task(
    name: str, directory: str | Path, *, num_held_out: int = 200, seed: int
) -> TaskFiles:
    """Write the 1,000 prompts "000=" to "999=" of a task, split by seed; files in digit order.

    Raises ConfigError for an unknown task, or unless 1 <= num_held_out < 1000.
    """
    if name not in TASKS:
        raise ConfigError(f"task = {name!r}; known: {', '.join(TASKS)}{nearest(name, TASKS)}")
    if not 1 <= num_held_out < 1000:
        raise ConfigError(f"task {name}: num_held_out = {num_held_out}; 1 to 999 is allowed")
    rows = [
        {"input": f"{number:03d}=", "label": TASKS[name](f"{number:03d}")} for number in range(1000)
    ]
    order = permutation(1000, seed=seed, epoch=0, shuffle=True).tolist()
    train = [rows[place] for place in sorted(order[num_held_out:])]
    held_out = [rows[place] for place in sorted(order[:num_held_out])]
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    files = TaskFiles(directory / "train.jsonl", directory / "held_out.jsonl")
    for path, part in ((files.train, train), (files.held_out, held_out)):
        path.write_text("".join(json.dumps(row) + "\n" for row in part))
    return files


def build_tokenizer(directory: str | Path) -> "PreTrainedTokenizerBase":
    """Write and give the tokenizer of the tasks: one token a character, 64 in all.

    Ids: 0 <pad>, 1 <eos>, 2 <unk> (any other character), then CHARACTERS in order.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    ids = {token: place for place, token in enumerate(VOCABULARY)}
    characters = Tokenizer(models.WordLevel(ids, unk_token=UNK))
    characters.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    characters.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=characters,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNK,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(str(directory))
    return tokenizer


def build_model(
    directory: str | Path,
    *,
    hidden_size: int = 128,
    num_layers: int = 2,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 32,
    intermediate_size: int = 384,
    vocab_size: int = 64,
    max_position_embeddings: int = 1024,
    tie: bool = True,
    seed: int,
) -> Path:
    """Write a random fp32 Qwen3 and the tasks' tokenizer, in Hugging Face layout; give the path.

    The defaults make 402,176 parameters, which learn max3 in about 200 steps. The caller's random
    state is left as it was. Raises ConfigError when sizes do not fit each other.
    """
    if vocab_size < len(VOCABULARY):
        raise ConfigError(
            f"vocab_size = {vocab_size}; the tokenizer needs {len(VOCABULARY)} or more"
        )
    if num_heads % num_kv_heads:
        raise ConfigError(f"num_kv_heads = {num_kv_heads}; it must divide num_heads = {num_heads}")
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=head_dim,
        max_position_embeddings=max_position_embeddings,
        tie_word_embeddings=tie,
        pad_token_id=VOCABULARY.index(PAD),
        eos_token_id=VOCABULARY.index(EOS),
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
    model.save_pretrained(str(directory))
    build_tokenizer(directory)
    return Path(directory)
