"""The run directory: what is committed, what it hashes to, who holds it."""

from relax.store.arrow import read_table, rows
from relax.store.commit import Output
from relax.store.manifest import Manifest, Published
from relax.store.run import Run

__all__ = ["Manifest", "Output", "Published", "Run", "read_table", "rows"]
