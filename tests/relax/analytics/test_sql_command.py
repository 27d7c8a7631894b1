import json

import pytest
from pyarrow import parquet

from relax.cli import main

BY_STEP = "SELECT step, raw_reward FROM steps ORDER BY step"


def test_a_table(run, capsys):
    assert main(["sql", str(run.root), BY_STEP]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["┃", "step", "┃", "raw_reward", "┃"]
    assert lines[3].split() == ["│", "0", "│", "0.25", "│"]


def test_csv(run, capfdbinary):
    assert main(["sql", str(run.root), BY_STEP, "--format", "csv"]) == 0
    assert capfdbinary.readouterr().out == b"step,raw_reward\r\n0,0.25\r\n1,0.75\r\n2,0.0\r\n"


def test_json_is_one_object_a_line(run, capfdbinary):
    query = "SELECT step, [1, 2] AS l, NULL AS n, prompt FROM prompts LIMIT 1"
    assert main(["sql", str(run.root), query, "--format", "json"]) == 0
    row = {"step": 0, "l": [1, 2], "n": None, "prompt": "0+1="}
    assert json.loads(capfdbinary.readouterr().out) == row


def test_parquet_to_a_file(run, tmp_path):
    target = tmp_path / "out.parquet"
    words = ["sql", str(run.root), BY_STEP, "--format", "parquet", "--output", str(target)]
    assert main(words) == 0
    assert parquet.read_table(target).to_pydict() == {
        "step": [0, 1, 2],
        "raw_reward": [0.25, 0.75, 0.0],
    }


def test_a_named_question_of_two_runs(run, own_run, capfdbinary):
    roots = [str(run.root), str(own_run.root)]
    assert main(["sql", *roots, "--question", "held-out", "--format", "csv"]) == 0
    assert capfdbinary.readouterr().out.decode().splitlines() == [
        "run,eval_name,decoding,policy_version,answers,reward,response_len",
        "own,held_out,greedy,0,2,0.5,1.0",
        "small,held_out,greedy,0,2,0.5,1.0",
    ]


def test_markup_and_long_texts_are_shown_as_they_are(run, capsys):
    query = "SELECT '[red]a[/red]' AS a, repeat('x', 100) AS b, NULL AS c"
    assert main(["sql", str(run.root), query]) == 0
    shown = capsys.readouterr().out
    assert "[red]a[/red]" in shown
    assert "x" * 58 + ".." in shown
    assert "x" * 59 not in shown


def test_no_rows_says_what_is_missing(own_run, capsys):
    assert main(["sql", str(own_run.root), "SELECT 1 WHERE false"]) == 0
    assert capsys.readouterr().err == ""
    for path in own_run.root.glob("steps/*/score"):
        for file in path.iterdir():
            file.unlink()
        path.rmdir()
    assert main(["sql", str(own_run.root), "--question", "drift-by-position"]) == 0
    assert "no rows: the run has no old_logp" in capsys.readouterr().err


def test_lists(capsys):
    assert main(["sql", "--list"]) == 0
    assert "consumed-once" in capsys.readouterr().out
    assert main(["sql", "--columns"]) == 0
    shown = capsys.readouterr().out
    assert "responses\n" in shown
    assert "log-probability of each token, by the engine [nats]" in shown


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["sql"], "relax sql: give a run and a query"),
        (["sql", "--question", "held-out"], "relax sql: no run given"),
        (
            ["sql", "RUN", "SELECT error('no') FROM steps"],
            "relax sql: Invalid Input Error: no",
        ),
        (["sql", "RUN", "SELECT 1", "--formt", "csv"], "relax sql: unrecognized"),
        (["sql", "RUN", "SELECT 1", "--format", "xls"], "relax sql: argument --format"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(run, capsys, words, message):
    words = [str(run.root) if word == "RUN" else word for word in words]
    assert main(words) == 2
    err = capsys.readouterr().err
    assert err.startswith(message)
    assert err.count("\n") == 1


def test_a_run_given_twice_counts_once(run, capsys):
    query = "SELECT count(*) AS n FROM steps"
    words = [str(run.root), query, "--format", "csv"]
    assert main(["sql", *words]) == 0
    once = capsys.readouterr().out
    assert main(["sql", str(run.root), *words]) == 0
    assert capsys.readouterr().out == once


def test_a_file_needs_a_format(run, tmp_path, capsys):
    words = [str(run.root), "SELECT 1", "--output", str(tmp_path / "x")]
    assert main(["sql", *words]) == 2
    assert capsys.readouterr().err.endswith("give --format csv, json or parquet with it\n")
