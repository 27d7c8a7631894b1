"""The schemas are a contract: their text is frozen in schemas.txt.

A changed column is a changed line here, in docs/sql.md, and a raised SCHEMA_VERSION.
`python tests/relax/test_schema.py` writes the file anew.
"""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from relax.schema import IDS_PER_STEP, SCHEMA_VERSION, TABLES, VIEWS
from relax.store.arrow import content_hash, read_table, rows, write_table

FROZEN = Path(__file__).with_name("schemas.txt")


def text():
    lines = [f"version {SCHEMA_VERSION}"]
    for table in TABLES.values():
        for column in table.columns:
            null = " null" if column.nullable else ""
            lines.append(f"{table.name}.{column.name}: {column.type}{null}")
    return "\n".join(lines) + "\n"


def test_the_schemas_are_what_they_were():
    assert text() == FROZEN.read_text()


def test_every_column_says_what_it_means():
    for table in (*TABLES.values(), *VIEWS.values()):
        for column in table.columns:
            assert column.meaning, f"{table.name}.{column.name}"
            assert column.name.isidentifier() and column.name == column.name.lower()


def test_kind_and_version_travel_in_the_file():
    for name, table in TABLES.items():
        assert table.name == name
        assert table.schema.metadata == {
            b"relax.table": name.encode(),
            b"relax.version": str(SCHEMA_VERSION).encode(),
        }


def value_of(kind):
    """Two values of a type, the second an edge of it."""
    if pa.types.is_list(kind):
        return [value_of(kind.value_type), []]
    if pa.types.is_string(kind):
        return ["text", "\u2192 \n\0"]
    if pa.types.is_boolean(kind):
        return [True, False]
    if pa.types.is_integer(kind):
        return [1, np.iinfo(kind.to_pandas_dtype()).max]
    return [0.5, float("inf")]


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES.keys())
def test_values_return_from_disk_as_they_were(tmp_path, table):
    columns = {column.name: value_of(column.type) for column in table.columns}
    made = table.table(**columns)
    write_table(tmp_path / "a.arrow", made)
    found = read_table(tmp_path / "a.arrow", table)
    assert found.to_pydict() == columns
    assert content_hash(found) == content_hash(made)
    for name, column in vars(rows(found)).items():
        as_lists = [x.tolist() if isinstance(x, np.ndarray) else x for x in column]
        assert as_lists == columns[name]


def test_nullable_columns_may_be_left_out_and_others_not():
    scores = TABLES["scores"]
    assert scores.table(sample_id=[1, 2]).column("old_logp").null_count == 2
    with pytest.raises(KeyError):
        TABLES["rewards"].table(sample_id=[1])
    with pytest.raises(AssertionError, match="unknown columns"):
        scores.table(sample_id=[1], rewrd=[2.0])


def test_ids_hold_their_step():
    assert (12 * IDS_PER_STEP + 34) // IDS_PER_STEP == 12


if __name__ == "__main__":
    FROZEN.write_text(text())
