import hashlib
import pickle
import sys

import pytest

from relax.custom import check_source, identity, load_function, source_file
from relax.errors import ConfigError, FunctionError

SOURCE = """
import math
from dataclasses import dataclass

@dataclass
class Weights:
    scale: float = 2.0

def scaled(text, label, *, scale=2.0):
    return scale * len(text)

def longer(text, label, extra):
    return 1.0
"""


@pytest.fixture
def mine(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(SOURCE)
    return path


def load(path):
    return load_function(path, flag="reward.custom_path", signature=("text", "label"))


def error_of(path):
    with pytest.raises(ConfigError) as caught:
        load(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_from_a_file_and_from_a_module(mine, monkeypatch):
    assert load(f"{mine}:scaled")("abc", "") == 6.0
    package = mine.parent / "relax_test_package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "rewards.py").write_text(SOURCE.replace("2.0", "3.0"))
    monkeypatch.syspath_prepend(mine.parent)
    assert load("relax_test_package.rewards:scaled")("abc", "") == 9.0
    assert source_file("relax_test_package.rewards:scaled", flag="--f") == package / "rewards.py"


def test_a_file_is_run_once_and_again_when_it_changed(mine):
    first = load(f"{mine}:scaled")
    assert vars(load(f"{mine}:scaled"))["__wrapped__"] is vars(first)["__wrapped__"]
    mine.write_text(SOURCE.replace("2.0", "5.0"))
    assert load(f"{mine}:scaled")("abc", "") == 15.0
    assert first("abc", "") == 6.0


def test_identity_is_the_hash_of_the_bytes_and_the_name_and_runs_nothing(mine):
    mine.write_text("raise RuntimeError\n")
    known = hashlib.sha256(b"raise RuntimeError\n").hexdigest()
    assert identity(f"{mine}:f", flag="--f") == f"{known}:f"


def test_paths_that_are_none(mine):
    forms = "'package.module:function' or 'path/file.py:function' is needed"
    for path in ("", "mine.py", "mine.py:", ":f", "mine.py:a b"):
        assert error_of(path) == f"reward.custom_path = {path!r}; {forms}"
    assert error_of("gone.py:f") == f"reward.custom_path = 'gone.py:f': no file gone.py; {forms}"
    for module in ("relax_gone", "relax_gone.x", ".x", "sys"):
        assert error_of(f"{module}:f") == (
            f"reward.custom_path = '{module}:f': no Python module {module!r} on the import path; "
            f"{forms}"
        )


def test_functions_that_are_not_there(mine):
    path = f"{mine}:scale"
    assert error_of(path) == (
        f"reward.custom_path = {path!r}: no function 'scale' there; did you mean scaled?"
    )
    path = f"{mine}:math"
    assert error_of(path) == (
        f"reward.custom_path = {path!r}: no function 'math' there; it has: scaled, longer"
    )


def test_signatures(mine):
    path = f"{mine}:longer"
    assert error_of(path) == (
        f"reward.custom_path = {path!r}: takes (text, label, extra); (text, label) is needed, "
        "by these names; further parameters with defaults"
    )


@pytest.mark.parametrize(
    ("source", "fault"),
    [
        ("def f(:\n", "SyntaxError: invalid syntax (mine.py, line 1)"),
        ("import relax_gone\n", "ModuleNotFoundError: No module named 'relax_gone'"),
        ("raise RuntimeError('two\\nlines')\n", "RuntimeError: two lines"),
    ],
)
def test_a_file_that_fails_leaves_one_line_and_no_module(mine, source, fault):
    mine.write_text(source)
    before = set(sys.modules)
    assert error_of(f"{mine}:f") == (
        f"reward.custom_path = '{mine}:f': importing {mine} failed: {fault}"
    )
    assert set(sys.modules) == before


def test_check_source_reads_parameters_without_running_the_file(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "import no_such_module_anywhere\n"
        "def good(a: Missing, b, c=Missing(), *, d: int = 3, **rest) -> Missing: ...\n"
        "def bad(b, a): ...\n"
        "def needy(a, b, *, c): ...\n"
        "made = good\n"
    )
    wanted = {"flag": "--f", "signature": ("a", "b")}
    check_source(f"{file}:good", **wanted)
    check_source(f"{file}:made", **wanted)  # not a plain def: load_function looks at it later
    for name in ("bad", "needy"):
        with pytest.raises(ConfigError, match=r"\(a, b\) is needed, by these names; further"):
            check_source(f"{file}:{name}", **wanted)
    file.write_text("def good(a, b:\n")
    with pytest.raises(ConfigError, match="is not Python"):
        check_source(f"{file}:good", **wanted)


FAILING = """
import sys

def inner(text):
    raise ValueError("no\\ngood")

def boom(text, label):
    return inner(text)

def leave(text, label):
    sys.exit(3)
"""


def test_a_function_that_fails_shows_its_own_frames_alone(mine):
    mine.write_text(FAILING)
    with pytest.raises(FunctionError) as caught:
        load(f"{mine}:boom")("a", "b")
    line, *frames = str(caught.value).splitlines()
    assert line == f"reward.custom_path = '{mine}:boom': ValueError: no good (mine.py:5)"
    assert [f for f in frames if "File" in f] == [
        f'  File "{mine}", line 8, in boom',
        f'  File "{mine}", line 5, in inner',
    ]
    assert frames[-1] == "ValueError: no good"
    assert caught.value.__cause__ is None and caught.value.__suppress_context__
    assert pickle.loads(pickle.dumps(caught.value)).at("sample 0").line == f"{line}, sample 0"
    with pytest.raises(FunctionError, match=r"leave': SystemExit: 3 \(mine\.py:11\)"):
        load(f"{mine}:leave")("a", "b")
