"""Prompts as the model gets them: rows of a source, rendered by template, tokenized, with labels.

A prompt keeps the number of its row, so that dropping others does not rename it.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from relax.data.inputs import chat_messages, check_template, label_text, shown, value_of, wrap
from relax.data.rows import content_hash, one_line, read_rows
from relax.errors import ArtifactError, ConfigError
from relax.model_dir import check_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = [
    "Prompt",
    "PromptSource",
    "content_hash",
    "keep_short",
    "load_tokenizer",
    "read_prompts",
    "read_rows",
]


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt. Example: Prompt(prompt_id=0, text="381=", tokens=(6, 11, 4, 13), label="8")."""

    prompt_id: int
    """Row number in the source, from 0; stable when other rows are dropped."""
    text: str
    """Rendered text, exactly what the tokenizer got."""
    tokens: tuple[int, ...]
    label: str


@dataclass(frozen=True, slots=True)
class PromptSource:
    """All usable prompts of a source, in the order of its rows."""

    prompts: tuple[Prompt, ...]
    dropped: int
    """Rows longer than max_prompt_len."""


def read_prompts(
    path: str | Path,
    tokenizer: "PreTrainedTokenizerBase",
    *,
    input_key: str,
    label_key: str,
    apply_chat_template: bool,
    prompt_template: str | None = None,
) -> list[Prompt]:
    r"""Read, render and tokenize all prompts of a source.

    The input of a row is a string or a list of chat messages {"role", "content"}; with
    apply_chat_template a string becomes one user message, and the template opens the answer.
    prompt_template, as in "{input}\nPut the final answer in \\boxed{{}}.", wraps the string, or the
    last user message. Chat templates write their own special tokens; plain text gets those that the
    tokenizer adds (as the begin token of Llama). Numbers as labels are turned to strings.

    Raises ArtifactError for a source that cannot be read; ConfigError for keys that rows lack,
    inputs, labels and templates that cannot be used.
    """
    path = Path(path)
    rows = read_rows(path)
    if apply_chat_template and tokenizer.chat_template is None:
        raise ConfigError(
            f"{tokenizer.name_or_path or 'tokenizer'}: apply_chat_template = true, but the "
            "tokenizer has no chat template; use an instruct model or set it to false"
        )
    check_template(prompt_template)
    texts, labels = [], []
    for number, row in enumerate(rows):
        where = f"{path}: row {number}"
        given = wrap(value_of(row, input_key, "input_key", where), prompt_template, where)
        texts.append(render(given, tokenizer, apply_chat_template, where))
        labels.append(label_text(value_of(row, label_key, "label_key", where), label_key, where))
    # One call for all rows: fast tokenizers are an order of magnitude quicker in batches.
    tokens = tokenizer(texts, add_special_tokens=not apply_chat_template, verbose=False).input_ids
    return [
        Prompt(number, text, tuple(ids), label)
        for number, (text, ids, label) in enumerate(zip(texts, tokens, labels, strict=True))
    ]


def keep_short(
    path: str | Path,
    prompts: list[Prompt],
    *,
    max_prompt_len: int,
    overlong: Literal["drop", "error"],
) -> PromptSource:
    """Keep the prompts of 1 to max_prompt_len tokens; longer ones are dropped or an error.

    Raises ConfigError for a prompt of no tokens, for one that is too long when overlong is "error",
    and when none is left.
    """
    for prompt in prompts:
        if not prompt.tokens:
            raise ConfigError(f"{path}: row {prompt.prompt_id}: the prompt renders to no tokens")
        if overlong == "error" and len(prompt.tokens) > max_prompt_len:
            raise ConfigError(
                f"{path}: row {prompt.prompt_id}: prompt length = {len(prompt.tokens)} tokens; "
                f"--rollout-max-prompt-len = {max_prompt_len}: raise it, or set "
                "--overlong-prompt drop"
            )
    kept = tuple(prompt for prompt in prompts if len(prompt.tokens) <= max_prompt_len)
    if not kept:
        shortest = min(len(prompt.tokens) for prompt in prompts)
        raise ConfigError(
            f"{path}: --rollout-max-prompt-len = {max_prompt_len} drops all "
            f"{len(prompts)} prompts; the shortest has {shortest} tokens"
        )
    return PromptSource(kept, len(prompts) - len(kept))


def render(
    given: object, tokenizer: "PreTrainedTokenizerBase", apply_chat_template: bool, where: str
) -> str:
    """Give the text of one prompt, through the tokenizer's chat template if asked for."""
    if not apply_chat_template:
        if isinstance(given, str):
            return given
        raise ConfigError(
            f"{where}: input = {shown(given)}; without apply_chat_template a string is needed"
        )
    import jinja2

    is_text = isinstance(given, str)
    messages = [{"role": "user", "content": given}] if is_text else chat_messages(given, where)
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except jinja2.TemplateError as error:
        raise ConfigError(f"{where}: the chat template refuses it: {one_line(error)}") from error
    assert isinstance(text, str)
    return text


def load_tokenizer(model_dir: str | Path) -> "PreTrainedTokenizerBase":
    """Load the tokenizer that lies in a model directory; nothing is downloaded.

    Raises ArtifactError when the directory or its tokenizer is missing or damaged.
    """
    model_dir = Path(model_dir)
    if not model_dir.is_dir():
        raise ArtifactError(
            f"{model_dir}: no such model directory; a local one in Hugging Face layout is needed "
            "(nothing is downloaded)"
        )
    check_tokenizer(model_dir)
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(model_dir), local_files_only=True)
    except Exception as error:  # the libraries raise bare Exception for a damaged tokenizer.json
        raise ArtifactError(
            f"{model_dir}: the tokenizer cannot be loaded: {type(error).__name__}: "
            f"{one_line(error)}"
        ) from error
