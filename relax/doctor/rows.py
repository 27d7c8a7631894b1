"""Prompt sources before a run: can every row be used, and do prompts fit the limits.

Tokens are counted by the library `tokenizers` alone, which loads in no time.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from relax.config import Config, DataSection
from relax.data.inputs import (
    chat_messages,
    check_template,
    label_text,
    shown,
    value_of,
    wrap,
)
from relax.data.rows import read_rows
from relax.errors import ConfigError
from relax.model_dir import read_config


def check_rows(config: Config, path: str) -> None:
    """Raise for a source of prompts that a rollout, or an evaluation, could not read."""
    settings, model = config.data, config.model.hf_checkpoint
    check_template(settings.prompt_template or None)
    is_there = Path(model, "config.json").exists()
    if settings.apply_chat_template and is_there and not has_chat_template(Path(model)):
        raise ConfigError(
            f"--apply-chat-template: {model} has no chat template; use an instruct model, or "
            "leave the setting out"
        )
    texts = prompt_texts(settings, path)
    if is_there:
        check_lengths(config, path, texts)


def has_chat_template(model: Path) -> bool:
    """Whether the model's tokenizer comes with one."""
    if any((model / name).exists() for name in ("chat_template.jinja", "chat_template.json")):
        return True
    try:
        return bool(json.loads((model / "tokenizer_config.json").read_bytes()).get("chat_template"))
    except (OSError, ValueError):
        return False


def prompt_texts(settings: DataSection, path: str) -> list[str]:
    """The text of each row's prompt, of chats all that is said; ConfigError names a faulty row."""
    texts = []
    for number, row in enumerate(read_rows(path)):
        where = f"{path}: row {number}"
        given = value_of(row, settings.input_key, "input_key", where)
        given = wrap(given, settings.prompt_template or None, where)
        label = value_of(row, settings.label_key, "label_key", where)
        label_text(label, settings.label_key, where)
        texts.append(_text(given, settings.apply_chat_template, where))
    return texts


def _text(given: Any, apply_chat_template: bool, where: str) -> str:
    if isinstance(given, str):
        return given
    if not apply_chat_template:
        raise ConfigError(
            f"{where}: input = {shown(given)}; without --apply-chat-template a string is needed"
        )
    return "\n".join(message["content"] for message in chat_messages(given, where))


def check_lengths(config: Config, path: str, texts: list[str]) -> None:
    """ConfigError where no prompt is within the limits; reads on until one is.

    A template and special tokens only add to what is counted here.
    """
    tokenizer = Path(config.model.hf_checkpoint) / "tokenizer.json"
    if not tokenizer.exists():
        return
    longest = config.data.rollout_max_prompt_len
    room = context_limit(config)
    shortest = None
    for length in lengths(tokenizer, texts):
        if length <= longest and (not room or length < room):
            return
        shortest = min(length, shortest or length)
    said = f"the shortest of {path} has {shortest} tokens"
    assert shortest is not None
    if shortest > longest:
        raise ConfigError(f"--rollout-max-prompt-len = {longest}: drops every prompt; {said}")
    raise ConfigError(f"--rollout-max-context-len = {room}: leaves no room to answer; {said}")


def context_limit(config: Config) -> int:
    """Tokens of prompt and response together; 0: any, as far as is known here."""
    given, own = config.model.hf_checkpoint, 0
    if given and Path(given, "config.json").exists():
        own = read_config(Path(given)).get("max_position_embeddings") or 0
    asked = config.rollout.rollout_max_context_len
    return min(own, asked) if own and asked else own or asked


def lengths(tokenizer: Path, texts: list[str]) -> Iterator[int]:
    """Tokens of each text, without special ones; none where the file is not a tokenizer's."""
    from tokenizers import Tokenizer

    try:
        loaded = Tokenizer.from_file(str(tokenizer))
    except Exception as error:  # the library raises nothing narrower
        raise ConfigError(f"{tokenizer}: cannot be loaded: {error}; copy it again") from None
    return (len(loaded.encode(text, add_special_tokens=False).ids) for text in texts)


def check_budget(config: Config) -> None:
    """ConfigError where a micro-batch cannot hold the longest prompt with the longest response.

    The turns and tools of a response are within its limit, too. An update would only find out once
    the rollout is there.
    """
    budget, prompt = config.update.max_tokens_per_gpu, config.data.rollout_max_prompt_len
    response = config.rollout.rollout_max_response_len
    longest = config.longest_sequence(context_limit(config))
    if not config.update.micro_batch_size and longest > budget:
        raise ConfigError(
            f"--max-tokens-per-gpu = {budget}: a prompt with its response may have {longest} "
            f"tokens, and is never split; raise it to {longest}, or lower "
            f"rollout_max_prompt_len = {prompt} or rollout_max_response_len = {response}"
        )
