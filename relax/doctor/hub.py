"""Names of the Hugging Face hub as directories of this machine's cache. Nothing is downloaded."""

from __future__ import annotations

import re
from pathlib import Path

from relax.config import Config
from relax.errors import ConfigError

MODELS = ("hf_checkpoint", "ref_load", "critic_load", "opd_teacher_load")
NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
"""ORG/NAME."""


def resolved(config: Config) -> Config:
    """The same settings with a directory for every model: jobs have no way to the hub.

    Raises ConfigError for a name that the cache does not hold.
    """
    found = {
        field: snapshot(field, given)
        for field in MODELS
        if (given := getattr(config.model, field)) and is_name(given)
    }
    if not found:
        return config
    return config.model_copy(update={"model": config.model.model_copy(update=found)})


def is_name(given: str) -> bool:
    """Whether it is no directory and looks like ORG/NAME."""
    return NAME.fullmatch(given) is not None and not Path(given).is_dir()


def snapshot(field: str, name: str) -> str:
    """Directory of the snapshot of `name` in the cache."""
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    cache = constants.HF_HUB_CACHE
    try:
        return snapshot_download(name, cache_dir=cache, local_files_only=True)
    except LocalEntryNotFoundError:
        raise ConfigError(
            f"model.{field} = {name!r}: no such directory, and no snapshot of it in {cache}; "
            f"nothing is downloaded: run `hf download {name}` first, or give a directory"
        ) from None
