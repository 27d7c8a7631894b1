"""From names to functions, and from a function's signature to what it is called with."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any


def resolve(name: str, home: str) -> Callable[..., Any]:
    """The function `name` of relax.algorithms.`home`, or of any module as "module:function"."""
    module, _, function = name.rpartition(":")
    return getattr(importlib.import_module(module or f"relax.algorithms.{home}"), function)


def knobs(function: Callable, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Those of `settings` that `function` takes as keyword-only arguments."""
    return {p.name: settings[p.name] for p in _knobs(function) if p.name in settings}


def inputs(function: Callable) -> list[str]:
    """Names of the arguments that are data, in order; those with a default are left out."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(function).parameters.values()
    return [p.name for p in parameters if p.kind in kinds and p.default is p.empty]


def _knobs(function: Callable) -> list[inspect.Parameter]:
    """Keyword-only arguments, and positional ones with a default (a custom function's knobs)."""
    parameters = inspect.signature(function).parameters.values()
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [
        p
        for p in parameters
        if p.kind is p.KEYWORD_ONLY or (p.default is not p.empty and p.kind not in variadic)
    ]
