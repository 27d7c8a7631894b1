import pytest

from relax.errors import ConfigError
from relax.rewards import VERIFIERS, verifier


def error_of(name, custom_path=None):
    with pytest.raises(ConfigError) as caught:
        verifier(name, custom_path)
    return str(caught.value)


@pytest.mark.parametrize(
    ("response", "label", "reward"),
    [
        (" 8\n", "8", 1.0),
        ("8", " 8", 1.0),
        ("8.", "8", 0.0),
        ("8 8", "88", 0.0),
        ("", "", 1.0),
        ("a", "A", 0.0),
    ],
)
def test_exact(response, label, reward):
    assert verifier("exact", None)(response, label) == reward


def test_the_table():
    assert sorted(VERIFIERS) == ["exact", "math"]
    assert verifier("math", None)("#### 8", "8.0") == 1.0


def test_unknown_names_and_the_nearest():
    assert error_of("maths") == "verifier = 'maths'; known: exact, math, custom; did you mean math?"
    assert error_of("") == "verifier = ''; known: exact, math, custom"


def test_custom_needs_its_path_and_only_custom_takes_one():
    assert error_of("custom") == (
        "verifier = 'custom': custom_path is missing; 'package.module:function' or "
        "'path/file.py:function' is needed"
    )
    assert error_of("math", "a.py:f") == (
        "verifier = 'math': custom_path = 'a.py:f' would be ignored; "
        "set verifier = 'custom' or leave custom_path out"
    )


def test_custom_function_and_its_faults(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        "def length(response_text, label):\n    return len(response_text) == int(label)\n"
        "def nothing(response_text, label):\n    pass\n"
        "def other(text, label):\n    return 1.0\n"
    )
    reward = verifier("custom", f"{path}:length")("abc", "3")
    assert (reward, type(reward)) == (1.0, float)
    with pytest.raises(ConfigError) as caught:
        verifier("custom", f"{path}:nothing")("abc", "3")
    assert str(caught.value) == f"custom_path = '{path}:nothing': returned None; a number is needed"
    assert error_of("custom", f"{path}:other") == (
        f"custom_path = '{path}:other': takes (text, label); (response_text, label) is needed, "
        "further parameters with defaults"
    )
