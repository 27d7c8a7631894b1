"""Views over all committed steps of a run, joined by keys, read-only."""

from __future__ import annotations

from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.dataset as ds

from relax.schema import TABLES, TIMING
from relax.store import Run
from relax.store.manifest import Manifest

VIEWS = {
    "prompts": "SELECT group_id // 1000000 AS step, * FROM prompts_table",
    "responses": """
        SELECT r.sample_id // 1000000 AS step, r.*, p.prompt_id, p.prompt, p.label, p.prompt_len,
               w.raw_reward, w.reward, a.advantage
        FROM responses_table r
        JOIN prompts_table p USING (group_id)
        LEFT JOIN rewards_table w USING (sample_id)
        LEFT JOIN advantages_table a USING (sample_id)""",
    "groups": """
        SELECT step, group_id, prompt_id, any_value(prompt) AS prompt, any_value(label) AS label,
               count(*) AS responses, avg(reward) AS reward, min(reward) AS reward_min,
               max(reward) AS reward_max, avg(response_len) AS response_len
        FROM responses GROUP BY step, group_id, prompt_id""",
    "steps": """
        SELECT step, count(*) AS responses, avg(reward) AS reward,
               avg(response_len) AS response_len, avg(truncated::INT) AS truncated
        FROM responses GROUP BY step""",
    "metrics": "SELECT * FROM metrics_table",
    "timing": "SELECT * FROM timing_table",
    "evals": "SELECT * FROM evals_table",
}


class OpenRun:
    """A run opened for questions. `sql` gives a DuckDB relation: fetchall, df, arrow, show."""

    def __init__(self, path: str | Path) -> None:
        self.run = Run.open(path)
        self._connection = duckdb.connect()
        for name, source in sources(self.run).items():
            self._connection.register(f"{name}_table", source)
        for name, query in VIEWS.items():
            self._connection.execute(f"CREATE VIEW {name} AS {query}")
        self._connection.execute("SET enable_external_access=false; SET lock_configuration=true")

    def sql(self, query: str) -> duckdb.DuckDBPyRelation:
        """The answer to a SQL query over the views."""
        return self._connection.sql(query)


def open_run(path: str | Path) -> OpenRun:
    """Open the run in directory `path` for questions."""
    return OpenRun(path)


def committed(run: Run) -> list[tuple[Path, Manifest]]:
    """Every committed stage of a run with its directory, in the order of steps."""
    found = []
    for folder in sorted((run.root / "steps").glob("[0-9]*/[a-z]*")):
        manifest = run.manifest(int(folder.parent.name), folder.name)
        if manifest is not None:
            found.append((folder, manifest))
    return found


def sources(run: Run) -> dict[str, ds.Dataset | pa.Table]:
    """Table name -> all committed files of that kind. Kinds without a file are empty tables."""
    files: dict[str, list[Path]] = {name: [] for name in TABLES}
    metrics, timings = [], []
    for folder, manifest in committed(run):
        for name in manifest.tables:
            files[name].append(folder / f"{name}.arrow")
        if "metrics" in manifest.tables:
            table = run.table(manifest.step, manifest.stage, "metrics")
            metrics.append(_placed(table, manifest))
        entries = zip(*manifest.timing, strict=True) if manifest.timing else ((), (), ())
        measure, value, text = entries
        timings.append(_placed(TIMING.table(measure=measure, value=value, text=text), manifest))
    found: dict[str, ds.Dataset | pa.Table] = {
        name: ds.dataset(paths, schema=TABLES[name].schema, format="ipc")
        if paths
        else TABLES[name].schema.empty_table()
        for name, paths in files.items()
        if name not in ("metrics", "timing")
    }
    found["metrics"] = _joined(metrics, "metrics")
    found["timing"] = _joined(timings, "timing")
    return found


def _placed(table: pa.Table, manifest: Manifest) -> pa.Table:
    """A table with the step and stage that it belongs to in front."""
    count = table.num_rows
    table = table.add_column(0, "stage", pa.array([manifest.stage] * count, pa.string()))
    return table.add_column(0, "step", pa.array([manifest.step] * count, pa.int64()))


def _joined(tables: list[pa.Table], name: str) -> pa.Table:
    if tables:
        return pa.concat_tables([t.replace_schema_metadata(None) for t in tables])
    where = [pa.field("step", pa.int64()), pa.field("stage", pa.string())]
    return pa.schema([*where, *TABLES[name].schema]).empty_table()
