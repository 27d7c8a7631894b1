import hashlib
import json

import pyarrow as pa
import pyarrow.parquet
import pytest

from relax.data.prompts import content_hash, read_rows
from relax.errors import ArtifactError

ROWS = [{"input": "1+1=", "label": 2}, {"input": "caf\u00e9\u2028", "label": 3}]


def write_stream(path, rows):
    table = pa.Table.from_pylist(rows)
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)


def error_of(path):
    with pytest.raises(ArtifactError) as caught:
        read_rows(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_jsonl_in_order_with_blank_lines_bom_and_odd_separators(tmp_path):
    path = tmp_path / "a.jsonl"
    lines = [json.dumps(row, ensure_ascii=False) for row in ROWS]
    path.write_bytes(("\ufeff" + lines[0] + "\r\n\n  \n" + lines[1]).encode())
    assert read_rows(path) == ROWS


@pytest.mark.parametrize("name", ["a.parquet", "no_suffix"])
def test_parquet_by_its_content(tmp_path, name):
    pyarrow.parquet.write_table(pa.Table.from_pylist(ROWS), tmp_path / name)
    assert read_rows(tmp_path / name) == ROWS


def test_parquet_keeps_chat_messages(tmp_path):
    rows = [{"input": [{"role": "user", "content": "hi"}], "label": "x"}]
    pyarrow.parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    assert read_rows(tmp_path / "a.parquet") == rows


def test_saved_dataset_in_the_order_of_its_state(tmp_path):
    write_stream(tmp_path / "b.arrow", ROWS[:1])
    write_stream(tmp_path / "a.arrow", ROWS[1:])
    assert read_rows(tmp_path) == [ROWS[1], ROWS[0]]
    state = {"_data_files": [{"filename": "b.arrow"}, {"filename": "a.arrow"}]}
    (tmp_path / "state.json").write_text(json.dumps(state))
    assert read_rows(tmp_path) == ROWS


def test_missing_file(tmp_path):
    assert error_of(tmp_path / "a.jsonl") == (
        f"{tmp_path}/a.jsonl: no such file or directory; a JSONL or Parquet file is needed"
    )
    assert error_of(tmp_path / "gsm8k" / "train.jsonl") == (
        f"{tmp_path}/gsm8k/train.jsonl: no such file or directory; "
        'download GSM8K train.jsonl/test.jsonl, each line {"question","answer"}'
    )


def test_empty_files(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("")
    assert error_of(path) == f"{path}: the file is empty; one JSON object a line is needed"
    path.write_text("\n\n")
    assert error_of(path) == f"{path}: holds no rows; at least one prompt is needed"
    pyarrow.parquet.write_table(pa.table({"input": pa.array([], pa.string())}), tmp_path / "b")
    assert error_of(tmp_path / "b") == f"{tmp_path}/b: holds no rows; at least one prompt is needed"


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        (b'{"input": "1', "not JSON: Unterminated string starting at column 11"),
        (b"{'input': 1}", "not JSON: Expecting property name enclosed in double quotes"),
        (b'{"a": 1} {"b": 2}', "not JSON: Extra data at column 10"),
        (b'["input", "label"]', "a JSON list; one JSON object a line is needed"),
        (b"\x1f\x8b\x08\x00", "not UTF-8: invalid start byte at byte 2"),
        (b"[" * 100_000, "not usable JSON: maximum recursion depth exceeded"),
        (b'{"label": ' + b"9" * 5000 + b"}", "not usable JSON: Exceeds the limit (4300 digits)"),
    ],
)
def test_a_damaged_line_is_named(tmp_path, line, fault):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"input": "x"}\n\n' + line + b"\n")
    assert error_of(path).startswith(f"{path}:3: {fault}")


def test_truncated_binary_files(tmp_path):
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pa.Table.from_pylist(ROWS), path)
    path.write_bytes(path.read_bytes()[:-20])
    assert error_of(path).startswith(f"{path}: not a whole Parquet file: ")
    path.unlink()
    path = tmp_path / "a.arrow"
    write_stream(path, ROWS)
    path.write_bytes(path.read_bytes()[:200])
    assert error_of(tmp_path).startswith(f"{path}: not a whole Arrow stream: ")


def test_directories_that_are_no_dataset(tmp_path):
    assert error_of(tmp_path).startswith(f"{tmp_path}: no *.arrow files; a directory saved by")
    (tmp_path / "state.json").write_text("{}")
    assert error_of(tmp_path).startswith(f"{tmp_path}/state.json: does not list _data_files")
    (tmp_path / "train").mkdir()
    (tmp_path / "test").mkdir()
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    assert error_of(tmp_path) == (
        f"{tmp_path}: holds several splits; name the directory of one of: test, train"
    )


def test_content_hash_of_a_file_is_its_sha256(tmp_path):
    (tmp_path / "a").write_bytes(b"abc")
    assert content_hash(tmp_path / "a") == (
        "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    )


def test_content_hash_of_a_directory_covers_names_bounds_and_bytes(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "x").write_bytes(b"12")
    (tmp_path / "a").write_bytes(b"345")
    expected = (
        b"a\0" + (3).to_bytes(8, "big") + b"345" + b"sub/x\0" + (2).to_bytes(8, "big") + b"12"
    )
    assert content_hash(tmp_path) == hashlib.sha256(expected).hexdigest()
    (tmp_path / "a").rename(tmp_path / "b")
    assert content_hash(tmp_path) != hashlib.sha256(expected).hexdigest()
    with pytest.raises(ArtifactError, match="no such file or directory"):
        content_hash(tmp_path / "gone")
