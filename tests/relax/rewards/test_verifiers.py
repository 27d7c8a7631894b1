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


def test_what_a_function_of_the_users_gives_must_be_a_number():
    reward = custom(lambda text, label: len(text) == int(label), "mine.py:length")("abc", "3")
    assert (reward, type(reward)) == (1.0, float)
    with pytest.raises(ConfigError) as caught:
        custom(lambda text, label: None, "mine.py:nothing")("abc", "3")
    said = "--custom-rm-path = 'mine.py:nothing': returned None; a number is needed"
    assert str(caught.value) == said
