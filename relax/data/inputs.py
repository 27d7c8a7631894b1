"""What a row of a prompt source gives: its input, with the template around it, and its label.

Importing this loads nothing heavy: the checks before a run read rows with it.
"""

import math
from collections.abc import Mapping
from decimal import Decimal
from string import Formatter
from typing import Any

from relax.errors import ConfigError
from relax.flags import nearest


def value_of(row: Mapping[str, Any], key: str, flag: str, where: str) -> Any:
    """Give row[key], or raise ConfigError that lists the keys there are."""
    if key in row:
        return row[key]
    known = ", ".join(row) or "none"
    raise ConfigError(f"{where}: no {flag} = {key!r}; keys: {known}{nearest(key, row)}")


def label_text(value: object, label_key: str, where: str) -> str:
    """Give a label as a string; of numbers, what Python prints."""
    if isinstance(value, str):
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if isinstance(value, float | Decimal) and math.isfinite(value):
        return str(value)
    raise ConfigError(
        f"{where}: label {label_key} = {shown(value)}; a string or a finite number is needed"
    )


def check_template(prompt_template: str | None) -> None:
    """Raise ConfigError unless the template is None or formats with {input} alone."""
    if prompt_template is None:
        return
    try:
        fields = {name for _, name, _, _ in Formatter().parse(prompt_template) if name is not None}
        prompt_template.format(input="")
    except (ValueError, KeyError, IndexError, AttributeError):
        fields = set()
    if fields != {"input"}:
        raise ConfigError(
            f"--prompt-template = {prompt_template!r}; it must hold {{input}} and no other field, "
            "and literal braces doubled: {{ }}"
        )


def wrap(given: object, prompt_template: str | None, where: str) -> object:
    """Put a string, or the last user message's text, into the template."""
    if prompt_template is None:
        return given
    if isinstance(given, str):
        return prompt_template.format(input=given)
    messages = chat_messages(given, where)
    for place in reversed(range(len(messages))):
        if messages[place]["role"] == "user":
            content = prompt_template.format(input=messages[place]["content"])
            return [
                *messages[:place],
                messages[place] | {"content": content},
                *messages[place + 1 :],
            ]
    raise ConfigError(f"{where}: prompt_template is set, but the chat holds no user message")


def chat_messages(given: object, where: str) -> list[dict[str, Any]]:
    """Check a list of chat messages; fields that Parquet filled with null are left out."""
    if isinstance(given, list) and given and all(map(is_message, given)):
        return [{k: v for k, v in message.items() if v is not None} for message in given]
    raise ConfigError(
        f"{where}: input = {shown(given)}; a string, or a list of chat messages "
        '{"role": ..., "content": ...} of strings, is needed'
    )


def is_message(message: object) -> bool:
    """Whether it is a mapping with a role and a content that are strings."""
    return (
        isinstance(message, Mapping)
        and isinstance(message.get("role"), str)
        and isinstance(message.get("content"), str)
    )


def shown(value: object) -> str:
    """Give a value for an error line: its repr, cut at 80 characters."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
