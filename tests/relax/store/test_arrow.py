"""Hashes of columns, and tables that are not what their name says."""

import numpy as np
import pyarrow as pa
import pytest
from store_cases import metrics

from relax.errors import ArtifactError
from relax.schema import METRICS, REWARDS, SCORES, TABLES
from relax.store.arrow import content_hash, read_table, rows, write_table


def scores(old_logp):
    return SCORES.table(sample_id=list(range(len(old_logp))), old_logp=old_logp)


def metric_rows(values):
    return METRICS.table(optimizer_step=[0] * len(values), metric=["m"] * len(values), value=values)


def test_the_hash_does_not_see_chunks_slices_or_files(tmp_path):
    whole = scores([[1.0, 2.0], None, [], [3.0]])
    chunked = pa.concat_tables([whole.slice(0, 1), whole.slice(1, 2), whole.slice(3)])
    longer = pa.concat_tables([scores([[9.0]]), whole]).slice(1)
    longer = longer.set_column(0, whole.schema.field(0), whole.column(0))
    write_table(tmp_path / "a.arrow", chunked)
    hashes = {content_hash(t) for t in (whole, chunked, longer)}
    assert hashes == {content_hash(read_table(tmp_path / "a.arrow", SCORES))}


def test_the_hash_is_the_same_for_ever():
    assert content_hash(metrics(1.0)) == (
        "7d4b06372341484ef5962101aa5f26831cabef2df5df43b5f392e9e8acc98946"
    )


@pytest.mark.parametrize(
    "other",
    [
        [[1.0, 2.0], [3.0]],
        [[1.0], [2.0, 3.0], []],
        [[1.0, 2.0], [3.0], None],
        [[1.0, 2.0], [3.5], []],
        [[1.0, 2.0], [], [3.0]],
    ],
)
def test_the_hash_sees_every_value_and_boundary(other):
    assert content_hash(scores([[1.0, 2.0], [3.0], []])) != content_hash(scores(other))


def test_the_hash_sees_signs_bits_and_texts():
    assert content_hash(metrics(0.0)) != content_hash(metrics(-0.0))
    assert content_hash(metrics(1.0)) != content_hash(metrics(np.nextafter(1.0, 2.0)))
    one = METRICS.table(optimizer_step=[0, 0], metric=["ab", "c"], value=[1.0, 1.0])
    two = METRICS.table(optimizer_step=[0, 0], metric=["a", "bc"], value=[1.0, 1.0])
    assert content_hash(one) != content_hash(two)


def test_rows_gives_columns_by_name():
    found = rows(pa.concat_tables([scores([[1.0], None]), scores([[2.0, 3.0]])]))
    assert found.sample_id.tolist() == [0, 1, 0]
    assert [None if x is None else x.tolist() for x in found.old_logp] == [[1.0], None, [2.0, 3.0]]
    assert found.ref_logp == [None, None, None]


def test_a_missing_table_is_told(tmp_path):
    with pytest.raises(ArtifactError, match=r"a.arrow: missing"):
        read_table(tmp_path / "a.arrow", METRICS)


@pytest.mark.parametrize("keep", [0, 7, 0.5, 0.99])
def test_a_truncated_table_is_told(tmp_path, keep):
    path = tmp_path / "a.arrow"
    write_table(path, metric_rows(list(range(1000))))
    data = path.read_bytes()
    path.write_bytes(data[: int(keep * len(data)) if isinstance(keep, float) else keep])
    with pytest.raises(ArtifactError, match=r"a.arrow: truncated or not an Arrow file"):
        read_table(path, METRICS)


def test_a_table_of_another_kind_is_told(tmp_path):
    write_table(tmp_path / "a.arrow", metrics(1.0))
    said = r"a.arrow: not a rewards table: missing sample_id: int64; .*; unknown value"
    with pytest.raises(ArtifactError, match=said):
        read_table(tmp_path / "a.arrow", REWARDS)


def test_a_table_of_an_older_schema_is_told(tmp_path):
    kind = {"relax.table": "metrics", "relax.version": "0"}
    write_table(tmp_path / "a.arrow", metrics(1.0).replace_schema_metadata(kind))
    said = "a.arrow: not a metrics table: schema version 0; read it with the version that wrote it"
    with pytest.raises(ArtifactError, match=said):
        read_table(tmp_path / "a.arrow", METRICS)


def test_a_column_of_another_type_is_told(tmp_path):
    schema = METRICS.schema.set(2, pa.field("value", pa.float32(), nullable=False))
    write_table(tmp_path / "a.arrow", metrics(1.0).cast(schema))
    with pytest.raises(ArtifactError, match="value is float, want double"):
        read_table(tmp_path / "a.arrow", METRICS)


@pytest.mark.parametrize("kind", TABLES.values(), ids=TABLES.keys())
def test_every_kind_of_table_returns_from_disk(tmp_path, kind):
    empty = kind.schema.empty_table()
    write_table(tmp_path / "a.arrow", empty)
    assert read_table(tmp_path / "a.arrow", kind).equals(empty)
