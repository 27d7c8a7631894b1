"""The prompts of a run: rendered and tokenized once, for all its jobs.

RUN/cache/prompts-KEY.arrow saves time and nothing else: what is absent or damaged is made again.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa

from relax.data.prompts import Prompt, PromptSource, keep_short, read_prompts
from relax.data.prompts import content_hash as source_hash
from relax.errors import ArtifactError
from relax.schema import SOURCE_PROMPTS
from relax.stages.perform import Warm
from relax.store import Run, rows
from relax.store.arrow import content_hash, write_table
from relax.store.manifest import digest

_CONTENT = b"relax.content"
"""Hash of the columns, in the file's metadata: Arrow itself does not notice changed bytes."""


def prompts_for(
    run: Run, source: Literal["prompts", "eval_prompts"], tokenizer: Any, warm: Warm
) -> PromptSource:
    """The usable prompts of one of the run's sources, read once a process.

    ArtifactError when the source is not what it was when the run began.
    """
    data, evaluate = run.config.data, run.config.evaluate
    path = data.prompt_data if source == "prompts" else evaluate.eval_prompt_data
    if path in warm.prompts:
        return warm.prompts[path]
    if source_hash(path) != run.sources[source]:
        raise ArtifactError(f"{path}: changed since the run began; put the old file back")
    settings: dict[str, Any] = {
        "input_key": data.input_key,
        "label_key": data.label_key,
        "apply_chat_template": data.apply_chat_template,
        "prompt_template": data.prompt_template or None,
    }
    made_by = {name: version(name) for name in ("transformers", "tokenizers")}
    key = {"source": run.sources[source], "tokenizer": run.sources["tokenizer"]}
    prompts = cached(
        run.root / "cache",
        key | settings | made_by,
        lambda: read_prompts(path, tokenizer, **settings),
    )
    warm.prompts[path] = keep_short(
        path, prompts, max_prompt_len=data.rollout_max_prompt_len, overlong=data.overlong_prompt
    )
    return warm.prompts[path]


def cached(folder: Path, key: Mapping[str, Any], make: Callable[[], list[Prompt]]) -> list[Prompt]:
    """What `make` gives, from a file of `folder` where one of the same `key` was written before."""
    path = folder / f"prompts-{digest(dict(key))[:16]}.arrow"
    table = _read(path)
    if table is not None:
        column = rows(table)
        tokens = [tuple(ids.tolist()) for ids in column.prompt_tokens]
        columns = column.prompt_id.tolist(), column.prompt, tokens, column.label
        return [Prompt(*row) for row in zip(*columns, strict=True)]
    prompts = make()
    try:
        _write(path, prompts)
    except OSError as error:  # costs the next job some time, and this one nothing
        print(f"{path}: {error.strerror or error}; prompts are not kept", file=sys.stderr)
    return prompts


def _read(path: Path) -> pa.Table | None:
    try:
        with pa.memory_map(str(path)) as source:
            table = pa.ipc.open_file(source).read_all()
        content = (table.schema.metadata or {}).get(_CONTENT)
        is_whole = content == content_hash(table).encode()
        return table if is_whole and table.schema.equals(SOURCE_PROMPTS.schema) else None
    except (pa.ArrowException, OSError, ValueError):  # ValueError: a text that is no UTF-8
        return None


def _write(path: Path, prompts: list[Prompt]) -> None:
    """Whole, then renamed: several jobs may write the same."""
    table = SOURCE_PROMPTS.table(
        prompt_id=[p.prompt_id for p in prompts],
        prompt=[p.text for p in prompts],
        prompt_tokens=[p.tokens for p in prompts],
        label=[p.label for p in prompts],
    )
    table = table.replace_schema_metadata({_CONTENT: content_hash(table)})
    scratch = path.with_name(f".{path.name}-{socket.gethostname()}-{os.getpid()}")
    path.parent.mkdir(exist_ok=True)
    try:
        write_table(scratch, table)
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)
