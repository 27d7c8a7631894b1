"""`relax sql RUN "SELECT ..."`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import duckdb
from rich.console import Console
from rich.table import Table

from relax.analytics.views import VIEWS, open_run
from relax.errors import ConfigError


def sql(argv: Sequence[str]) -> int:
    """Print the answer to a query as a table."""
    parser = argparse.ArgumentParser(
        prog="relax sql",
        description=f"Ask a run anything. Views: {', '.join(VIEWS)}.",
    )
    parser.add_argument("run", help="directory of the run")
    parser.add_argument("query", help="SQL (DuckDB)")
    given = parser.parse_args(argv)
    try:
        answer = open_run(given.run).sql(given.query)
        columns, found = answer.columns, answer.fetchall()
    except duckdb.Error as error:
        raise ConfigError(str(error)) from None
    table = Table(*columns)
    for row in found:
        table.add_row(*(f"{v:.4g}" if isinstance(v, float) else str(v) for v in row))
    Console().print(table)
    return 0
