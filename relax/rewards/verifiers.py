"""The table of verifiers, and the way to one by name."""

import difflib
from collections.abc import Callable
from numbers import Real

from relax.custom import FORMS, load_function
from relax.errors import ConfigError
from relax.rewards.exact import exact
from relax.rewards.math_answer import math_answer

Verifier = Callable[[str, str], float]

VERIFIERS: dict[str, Verifier] = {
    "exact": exact,
    "math": math_answer,
}


def verifier(name: str, custom_path: str | None = None) -> Verifier:
    """Give the verifier called name; "custom" is the function at custom_path.

    That function is f(response_text, label) -> float.

    Raises ConfigError for an unknown name, for "custom" without a path, and for a path beside any
    other name, which would be ignored.
    """
    if name == "custom":
        if custom_path is None:
            raise ConfigError(f"verifier = 'custom': custom_path is missing; {FORMS}")
        return custom(custom_path)
    if name not in VERIFIERS:
        known = [*VERIFIERS, "custom"]
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ConfigError(f"verifier = {name!r}; known: {', '.join(known)}{hint}")
    if custom_path is not None:
        raise ConfigError(
            f"verifier = {name!r}: custom_path = {custom_path!r} would be ignored; "
            "set verifier = 'custom' or leave custom_path out"
        )
    return VERIFIERS[name]


def custom(custom_path: str) -> Verifier:
    """Load the user's verifier; what it returns must be a number, else ConfigError."""
    function = load_function(custom_path, flag="custom_path", signature=("response_text", "label"))

    def verify(response_text: str, label: str) -> float:
        reward = function(response_text, label)
        if not isinstance(reward, Real):
            raise ConfigError(
                f"custom_path = {custom_path!r}: returned {reward!r:.80}; a number is needed"
            )
        return float(reward)

    return verify
