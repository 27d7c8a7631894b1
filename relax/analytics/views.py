"""DuckDB views over all committed steps of one or several runs, joined by keys, read-only."""

from __future__ import annotations

import tempfile
from pathlib import Path

import duckdb

from relax.analytics.faults import told
from relax.analytics.tables import SEPARATE, tables
from relax.errors import ConfigError
from relax.schema import IDS_PER_STEP, VIEWS
from relax.store import Run

STEP_OF = f"// {IDS_PER_STEP} AS step"
QUERIES = {
    "prompts": f"SELECT group_id {STEP_OF}, * FROM {{prompts}}",
    "responses": f"""
        SELECT r.sample_id {STEP_OF}, r.*, p.* EXCLUDE (group_id)
        FROM {{responses}} r JOIN {{prompts}} p USING (group_id)""",
    "groups": f"""
        SELECT p.group_id {STEP_OF}, p.group_id, p.prompt_id, p.epoch, p.prompt, p.label,
               g.* EXCLUDE (group_id)
        FROM {{prompts}} p JOIN (
            SELECT group_id, count(*) AS responses, avg(raw_reward) AS raw_reward,
                   avg(reward) AS reward, min(reward) AS reward_min, max(reward) AS reward_max,
                   avg(response_len) AS response_len, min(reward) < max(reward) AS has_signal
            FROM {{responses}} GROUP BY group_id
        ) g USING (group_id)""",
    "steps": f"""
        SELECT sample_id {STEP_OF}, min(policy_version) AS policy_version,
               count(*) AS responses, sum(response_len)::BIGINT AS tokens,
               avg(raw_reward) AS raw_reward, avg(reward) AS reward,
               avg(response_len) AS response_len, avg(truncated::INT) AS truncated,
               sum(rollout_logp_sum) / sum(response_len) AS logp
        FROM {{responses}} GROUP BY 1""",
    "candidates": f"""
        SELECT c.group_id {STEP_OF}, c.*,
               CASE WHEN NOT c.passed THEN c.reason
                    WHEN p.group_id IS NULL THEN 'surplus: the step was full, or never finished'
                    ELSE 'trained' END AS fate
        FROM {{candidates}} c LEFT JOIN {{prompts}} p USING (group_id)""",
    "metrics": "SELECT * FROM {metrics}",
    "timing": "SELECT * FROM {timing}",
    "evals": "SELECT * EXCLUDE (stage) FROM {evals}",
    "jobs": "SELECT * FROM {jobs}",
}
"""View -> its query over one run's tables; the view is that of every run, one below the other."""

SAFE = """
SET python_enable_replacements = false;
SET enable_external_access = false;
SET lock_configuration = true;
"""
"""DuckDB's own locks: no file is read or written, and nothing can undo that."""


class OpenRun:
    """Runs opened for questions. `sql` gives a DuckDB relation: fetchall, df, arrow, show."""

    def __init__(self, *paths: str | Path) -> None:
        self.runs = [Run.open(path) for path in paths]
        self._connection = duckdb.connect()
        spill = str(Path(tempfile.gettempdir()) / "relax-sql")
        self._connection.execute("SET temp_directory = ?", [spill])
        names = run_names(self.runs)
        for place, run in enumerate(self.runs):
            for table, found in tables(run).items():
                self._connection.register(f"run{place}_{table}", found)
        for view in VIEWS:
            self._connection.execute(f"CREATE VIEW {view} AS {_view_sql(view, names)}")
        self._connection.execute(SAFE)

    def sql(self, query: str) -> duckdb.DuckDBPyRelation:
        """The answer to a SQL query over the views; ConfigError says what is wrong with it."""
        try:
            answer = self._connection.sql(query)
        except duckdb.Error as error:
            raise ConfigError(told(error, query)) from None
        if answer is None:
            raise ConfigError("not a question: give a SELECT; a run is never written to")
        return answer


def open_run(*paths: str | Path) -> OpenRun:
    """Open the runs in the directories `paths` for questions."""
    if not paths:
        raise ConfigError("open_run: no run given; give the directory of one or more")
    return OpenRun(*paths)


def run_names(runs: list[Run]) -> list[str]:
    """The name of each run's directory; whole paths where two have the same."""
    names = [run.root.name for run in runs]
    return names if len(set(names)) == len(names) else [str(run.root) for run in runs]


def _view_sql(view: str, names: list[str]) -> str:
    columns = ", ".join(column.name for column in VIEWS[view].columns)
    parts = []
    for place, name in enumerate(names):
        sources = {t: f"run{place}_{t}" for t in ("responses", "timing", "jobs", *SEPARATE)}
        literal = "'" + name.replace("'", "''") + "'"
        query = QUERIES[view].format(**sources)
        parts.append(f"SELECT {columns} FROM (SELECT {literal} AS run, * FROM ({query}))")
    return " UNION ALL ".join(parts)
