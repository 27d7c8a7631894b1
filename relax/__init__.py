"""Relax: reinforcement-learning post-training of language models, every stage an artifact."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from relax.analytics.views import open_run

__version__ = "0.1.0"
__all__ = ["__version__", "open_run"]


def __getattr__(name: str) -> Any:
    """`relax.open_run(path)`, loaded when it is first asked for: `import relax` stays light."""
    if name == "open_run":
        from relax.analytics.views import open_run

        return open_run
    raise AttributeError(f"module 'relax' has no attribute {name!r}")
