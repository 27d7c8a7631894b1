"""Finished shards of an unfinished stage: RUN/steps/000012/.rollout.parts/<key>/<shard>/.

Each is a small commit like a stage's own. They lie under the key of the stage that they belong
to, and go when it is committed.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pyarrow as pa

from relax.errors import ArtifactError
from relax.schema import TABLES
from relax.store import disk
from relax.store.arrow import content_hash, read_table
from relax.store.commit import Output, parts_dir
from relax.store.manifest import MANIFEST, digest, read_manifest


def finished(root: Path, step: int, stage: str, key: str) -> set[int]:
    """Numbers of the shards that are there, of the stage under `key`; none is read."""
    folder = parts_dir(root, step, stage) / key
    try:
        return {int(path.parent.name) for path in folder.glob(f"[0-9]*/{MANIFEST}")}
    except FileNotFoundError:  # removed while it was listed: the stage is committed
        return set()


class Parts:
    """The shards of the attempt `output`, each of one table called `table`."""

    def __init__(self, output: Output, table: str) -> None:
        self._whole, self._table = output, table
        self._folder = parts_dir(output.root, output.step, output.stage) / output.key

    def read(self, shard: int) -> pa.Table | None:
        """A finished shard, memory-mapped; None where it is to be made.

        One that is damaged is removed: it can be made again, to the bit.
        """
        path = self._folder / f"{shard:04d}"
        try:
            manifest = read_manifest(path)
            if manifest is None:
                return None
            if manifest.key != digest(self._key_parts(shard)):
                raise ArtifactError(f"{path}: a shard of something else")
            table = read_table(path / f"{self._table}.arrow", TABLES[self._table])
            if content_hash(table) != manifest.tables[self._table].hash:
                raise ArtifactError(f"{path}: content differs from its manifest")
        except ArtifactError as error:
            print(f"{error}; the shard is made again", file=sys.stderr)
            disk.remove_tree(path)
            return None
        return table

    def commit(self, shard: int, table: pa.Table) -> None:
        """Keep a finished shard, whatever becomes of the stage."""
        output = Output(
            self._whole.root,
            self._whole.step,
            self._whole.stage,
            attempt=self._whole.attempt,
            key_parts=self._key_parts(shard),
            final=self._folder / f"{shard:04d}",
        )
        output.write(self._table, table)
        output.commit()

    def _key_parts(self, shard: int) -> dict[str, Any]:
        return {"stage": self._whole.key, "shard": shard}
