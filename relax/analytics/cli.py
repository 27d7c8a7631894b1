"""`relax sql RUN... "SELECT ..."`: ask runs anything."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import duckdb
import pyarrow as pa
from rich.console import Console
from rich.table import Table

from relax.analytics.faults import told
from relax.analytics.questions import QUESTIONS, question
from relax.analytics.views import OpenRun, open_run
from relax.errors import ConfigError
from relax.flags import command_parser
from relax.schema import VIEWS

EXAMPLES = """examples:
  relax sql runs/x "SELECT step, reward FROM steps ORDER BY step"
  relax sql runs/x runs/y --question reward-by-step --format csv
  relax sql --list          the named questions
  relax sql --columns       every view and column"""
WIDEST = 60


def sql(argv: Sequence[str]) -> int:
    """Print, or write, the answer to a query."""
    given = _parser().parse_args(argv)
    if given.list:
        return _list()
    if given.columns:
        return _columns()
    runs, query = _split(given)
    opened = open_run(*runs)
    named = question(given.question) if given.question else None
    text = named.sql(len(runs)) if named else query
    answer = fetch(opened, text)
    if given.format == "table" and given.output:
        raise ConfigError(f"--output {given.output}: give --format csv, json or parquet with it")
    if given.format == "table":
        _print(answer, f"-- {text}" if named else "")
        if named and named.needs and not answer.num_rows:
            print(f"no rows: the run has no {named.needs}", file=sys.stderr)
    else:
        write(answer, given.format, given.output)
    return 0


def fetch(opened: OpenRun, query: str) -> pa.Table:
    """The whole answer as an Arrow table; ConfigError in one line for what DuckDB refuses."""
    try:
        return opened.sql(query).to_arrow_table()
    except duckdb.Error as error:
        raise ConfigError(told(error, query)) from None


def _parser() -> argparse.ArgumentParser:
    parser = command_parser(
        "relax sql", f"Ask runs anything. Views: {', '.join(VIEWS)}. SQL is DuckDB's.", EXAMPLES
    )
    parser.add_argument("words", nargs="*", metavar="RUN... QUERY", help="directories, then SQL")
    parser.add_argument("--question", metavar="NAME", help="a named question in place of QUERY")
    parser.add_argument("--list", action="store_true", help="list the named questions")
    parser.add_argument("--columns", action="store_true", help="list every view and column")
    parser.add_argument(
        "--format", choices=("table", "csv", "json", "parquet"), default="table", help="[table]"
    )
    parser.add_argument(
        "--output", metavar="FILE", type=Path, help="write there instead of to the screen"
    )
    return parser


def _split(given: argparse.Namespace) -> tuple[list[str], str]:
    """The runs and the query among the words of the command line."""
    if given.question:
        if not given.words:
            raise ConfigError("no run given; relax sql RUN --question NAME")
        return list(dict.fromkeys(given.words)), ""
    if len(given.words) < 2:
        raise ConfigError(
            'give a run and a query: relax sql RUN "SELECT ..."; '
            "or --question NAME, --list, --columns"
        )
    return list(dict.fromkeys(given.words[:-1])), given.words[-1]


# --- ways to show an answer ----------------------------------------------------------------------


def write(answer: pa.Table, form: str, target: Path | None) -> None:
    """Write an answer as csv, json (one object a line) or parquet, to a file or to stdout."""
    if form == "parquet" and target is None and sys.stdout.isatty():
        raise ConfigError("--format parquet: binary; give --output FILE or redirect it")
    data = FORMATS[form](answer)
    if target is None:
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
    else:
        target.write_bytes(data)


def _csv(answer: pa.Table) -> bytes:
    import csv
    import io

    text = io.StringIO(newline="")
    writer = csv.writer(text)
    writer.writerow(answer.column_names)
    writer.writerows(zip(*(c.to_pylist() for c in answer.columns), strict=True))
    return text.getvalue().encode()


def _json(answer: pa.Table) -> bytes:
    import json

    lines = (json.dumps(row, default=str, ensure_ascii=False) for row in answer.to_pylist())
    return "".join(line + "\n" for line in lines).encode()


def _parquet(answer: pa.Table) -> bytes:
    from pyarrow import parquet

    sink = pa.BufferOutputStream()
    parquet.write_table(answer, sink)
    return sink.getvalue().to_pybytes()


FORMATS = {"csv": _csv, "json": _json, "parquet": _parquet}


def _print(answer: pa.Table, title: str) -> None:
    if title and sys.stdout.isatty():
        Console(stderr=True, highlight=False, style="dim").print(title, markup=False)
    table = Table(header_style="bold")
    for name, kind in zip(answer.column_names, answer.schema.types, strict=True):
        number = pa.types.is_integer(kind) or pa.types.is_floating(kind)
        table.add_column(name, justify="right" if number else "left", overflow="fold")
    for row in zip(*(c.to_pylist() for c in answer.columns), strict=True):
        table.add_row(*map(_cell, row))
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 200)
    console.print(table)


def _cell(value: object) -> str:
    """A value in at most WIDEST characters, with nothing that rich takes for markup."""
    from rich.markup import escape

    if value is None:
        return ""
    text = f"{value:.4g}" if isinstance(value, float) else str(value).replace("\n", "\\n")
    return escape(text if len(text) <= WIDEST else text[: WIDEST - 2] + "..")


def _list() -> int:
    width = max(map(len, QUESTIONS))
    for row in QUESTIONS.values():
        print(f"{row.name:{width}}  {row.asks}")
    return 0


def _columns() -> int:
    for view in VIEWS.values():
        print(view.name)
        for column in view.columns:
            unit = f" [{column.unit}]" if column.unit else ""
            print(f"  {column.name:18} {column.type!s:16} {column.meaning}{unit}")
    return 0
