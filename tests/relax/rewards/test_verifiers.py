import pytest

from relax.errors import ConfigError
from relax.rewards import VERIFIERS, custom, verifier


def error_of(load, name):
    with pytest.raises(ConfigError) as caught:
        load(name)
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
    assert verifier("exact")(response, label) == reward


def test_the_table():
    assert sorted(VERIFIERS) == ["exact", "math"]
    assert verifier("math")("#### 8", "8.0") == 1.0


def test_unknown_names_and_the_nearest():
    own = "a function of your own is given by --custom-rm-path"
    assert error_of(verifier, "maths") == (
        f"--rm-type = 'maths': known: exact, math; did you mean math?; {own}"
    )
    assert error_of(verifier, "custom") == f"--rm-type = 'custom': known: exact, math; {own}"


def test_custom_function_and_its_faults(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        "def length(response_text, label):\n    return len(response_text) == int(label)\n"
        "def nothing(response_text, label):\n    pass\n"
        "def other(text, label):\n    return 1.0\n"
    )
    reward = custom(f"{path}:length")("abc", "3")
    assert (reward, type(reward)) == (1.0, float)
    with pytest.raises(ConfigError) as caught:
        custom(f"{path}:nothing")("abc", "3")
    assert (
        str(caught.value)
        == f"--custom-rm-path = '{path}:nothing': returned None; a number is needed"
    )
    assert error_of(custom, f"{path}:other") == (
        f"--custom-rm-path = '{path}:other': takes (text, label); (response_text, label) is "
        "needed, by these names; further parameters with defaults"
    )


def test_an_async_function_is_refused(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("async def later(response_text, label):\n    return 1.0\n")
    said = error_of(custom, f"{path}:later")
    assert said == (
        f"--custom-rm-path = '{path}:later': async is not supported here; write a plain `def`"
    )
