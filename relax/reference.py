"""The reference pages that are written by code: `python -m relax.reference` puts them into docs/.

A test fails when a page is not what this module would write.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, get_args

from relax.algorithms import ALGORITHMS
from relax.analytics.questions import QUESTIONS
from relax.config import Section, flag_of, sections
from relax.schema import TABLES, VIEWS, Table
from relax.stages import STAGES

NOTE = "<!-- written by `python -m relax.reference`; edit {source} instead -->"


def sql_page() -> str:
    """docs/sql.md: views, columns, questions."""
    lines = [
        "# Asking a run",
        "",
        NOTE.format(source="relax/schema.py or relax/analytics/questions.py"),
        "",
        'A run is a database. `relax sql RUN "SELECT ..."` asks it in DuckDB\'s SQL, '
        "while it runs and after; nothing can be written. Several runs at once "
        "differ in the column `run`.",
        "",
        "```",
        'relax sql runs/x "SELECT step, reward FROM steps ORDER BY step"',
        "relax sql runs/x runs/y --question reward-by-step --format csv",
        "relax sql --list",
        "relax sql --columns",
        "```",
        "",
        'In Python, `relax.open_run("runs/x").sql("SELECT ...")` gives a DuckDB relation: '
        "`fetchall()`, `df()`, `to_arrow_table()`, `show()`. Columns of lists (one number a token) "
        "are read from disk only when they are named; prefer the scalars where they will do.",
        "",
        "## Views",
    ]
    for view in VIEWS.values():
        lines += ["", f"### {view.name}", "", *_columns(view)]
    lines += ["", "## Named questions", "", "`relax sql RUN --question NAME`.", ""]
    lines += ["| name | asks |", "|---|---|"]
    lines += [f"| `{q.name}` | {q.asks} |" for q in QUESTIONS.values()]
    lines += ["", "## Files", "", "The Arrow files that the views read, one a stage and step."]
    for table in TABLES.values():
        lines += ["", f"### {table.name}.arrow", "", *_columns(table)]
    return "\n".join(lines) + "\n"


def _columns(table: Table) -> list[str]:
    rows = [
        f"| `{c.name}` | `{str(c.type).replace('item: ', '')}` | {c.unit} | {c.meaning} |"
        for c in table.columns
    ]
    return ["| column | type | unit | meaning |", "|---|---|---|---|", *rows]


def configuration_page() -> str:
    """docs/configuration.md: every setting by section."""
    lines = [
        "# Configuration",
        "",
        NOTE.format(source="relax/config/"),
        "",
        "One TOML file with these sections, and a flag for every key: `[update] lr` is `--lr`. "
        "A flag beats the file, the file beats the default. Keys marked `*` say where or how, "
        "not what: they may change in a run that has begun.",
        "",
        "```",
        "relax check recipes/gsm8k_cpu.toml --prompt-data gsm8k/train.jsonl --lr 1e-5",
        "```",
    ]
    for name, section in sections().items():
        doc = " ".join((section.__doc__ or "").split())
        lines += ["", f"## [{name}]", "", doc, "", "| key | type | default | meaning |"]
        lines += ["|---|---|---|---|", *_settings(section)]
    return "\n".join(lines) + "\n"


def _settings(section: type[Section]) -> list[str]:
    rows = []
    for name, field in section.model_fields.items():
        star = " *" if (field.json_schema_extra or {}) == {"keyed": False} else ""
        meaning = " ".join((field.description or "").split()).replace("|", "\\|")
        default = _literal(field.default)
        kind = _kind(field.annotation)
        rows.append(f"| `{name}`{star} (`{flag_of(name)}`) | {kind} | {default} | {meaning} |")
    return rows


def _literal(default: Any) -> str:
    """A default as TOML would have it."""
    if default is None:
        return "unset"
    if isinstance(default, bool):
        return f"`{str(default).lower()}`"
    if isinstance(default, str):
        return f'`"{default}"`'
    return f"`{list(default) if isinstance(default, tuple) else default}`"


def _kind(annotation: Any) -> str:
    """The type in words: text, int, float, on/off, or the words that are allowed."""
    plain = {str: "text", int: "int", float: "float", bool: "on/off"}
    if annotation in plain:
        return plain[annotation]
    words = [str(a) for a in _arguments(annotation) if isinstance(a, str)]
    if words:
        return ", ".join(f"`{word}`" for word in words)
    inner = [plain[a] for a in _arguments(annotation) if a in plain]
    if annotation is not None and str(annotation).startswith("tuple"):
        return f"list of {inner[0]}"
    return inner[0] if inner else "table"


def _arguments(annotation: Any) -> list[Any]:
    found = []
    for argument in get_args(annotation):
        found += _arguments(argument) or [argument]
    return found


def stages_table() -> str:
    """README: the stages, in the order of a step."""
    lines = ["| stage | reads | writes | follows |", "|---|---|---|---|"]
    for stage in STAGES.values():
        reads = ", ".join(f"`[{name}]`" for name in stage.reads)
        follows = ", ".join(stage.after) or stage.continues
        lines.append(f"| `{stage.name}` | {reads} | {', '.join(stage.writes)} | {follows} |")
    return "\n".join(lines)


def algorithms_table() -> str:
    """README: the algorithms, one row each, as the table in the code has them."""
    lines = ["| `--advantage-estimator` | advantage | objective | paper |", "|---|---|---|---|"]
    for row in ALGORITHMS.values():
        link = f"[{row.paper}](https://arxiv.org/abs/{row.paper.removeprefix('arXiv:')})"
        advantage = row.advantage + (
            f", {row.whitening}" if "normalize_advantages" in row.required else ""
        )
        lines.append(f"| `{row.name}` | {advantage} | {row.objective} | {link} |")
    return "\n".join(lines)


BLOCKS = {"stages": stages_table, "algorithms": algorithms_table}
"""Parts of the README between `<!-- NAME -->` and `<!-- /NAME -->`."""


def with_blocks(text: str) -> str:
    """A README with its blocks as they would be written now."""
    for name, block in BLOCKS.items():
        head, rest = text.split(f"<!-- {name} -->\n")
        _, tail = rest.split(f"<!-- /{name} -->")
        text = f"{head}<!-- {name} -->\n{block()}\n<!-- /{name} -->{tail}"
    return text


PAGES = {"sql.md": sql_page, "configuration.md": configuration_page}


def main() -> None:
    """Write every page into docs/ (or the directory given)."""
    docs = Path(sys.argv[1] if len(sys.argv) > 1 else "docs")
    docs.mkdir(exist_ok=True)
    for name, page in PAGES.items():
        (docs / name).write_text(page())
        print(docs / name)
    readme = docs.parent / "README.md"
    if readme.exists():
        readme.write_text(with_blocks(readme.read_text()))
        print(readme)


if __name__ == "__main__":
    main()
