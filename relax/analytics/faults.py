"""DuckDB's errors in one line that lists what is valid."""

from __future__ import annotations

import re

import duckdb

from relax.flags import nearest
from relax.schema import VIEWS

COLUMN = re.compile(r'column "?([\w.]+)"? not found|does not have a column named "(\w+)"', re.I)
TABLE = re.compile(r"Table with name (\S+) does not exist", re.I)


def told(error: duckdb.Error, query: str) -> str:
    """One line: what is wrong with `query`, and what is there instead."""
    text = str(error)
    if found := TABLE.search(text):
        return f"{found[1]}: no such view{nearest(found[1], VIEWS)}; views: {', '.join(VIEWS)}"
    if found := COLUMN.search(text):
        return _unknown_column(found[1] or found[2], query)
    if isinstance(error, duckdb.PermissionException):
        return f"a run is only read, and only this run: {_first_line(text)}"
    return _first_line(text)


def _unknown_column(name: str, query: str) -> str:
    asked = [view for view in VIEWS if re.search(rf"\b{view}\b", query, re.I)]
    offered = {view: [c.name for c in VIEWS[view].columns] for view in asked or VIEWS}
    every = [column for columns in offered.values() for column in columns]
    listed = "; ".join(f"{view} has {', '.join(columns)}" for view, columns in offered.items())
    return f"{name}: no such column{nearest(name.rpartition('.')[2], every)}; {listed}"


def _first_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[0] if lines else "the query failed"
