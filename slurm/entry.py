"""What runs first in a job: import the target by name, only now, and call it."""

from __future__ import annotations

import importlib
from typing import Any


def run(target: str, arguments: dict[str, Any]) -> Any:
    """Call `package.module:function` with keyword `arguments`."""
    module, function = target.split(":")
    return getattr(importlib.import_module(module), function)(**arguments)
