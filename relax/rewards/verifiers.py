"""The table of verifiers, and the way to one by name."""

from collections.abc import Callable
from numbers import Real

from relax.errors import ConfigError
from relax.flags import nearest
from relax.rewards.exact import exact
from relax.rewards.math_answer import math_answer

FLAG = "--custom-rm-path"

Verifier = Callable[[str, str], float]

VERIFIERS: dict[str, Verifier] = {
    "exact": exact,
    "math": math_answer,
}


def verifier(name: str) -> Verifier:
    """Give the verifier called name; ConfigError for one that the table does not have."""
    if name not in VERIFIERS:
        raise ConfigError(
            f"--rm-type = {name!r}: known: {', '.join(VERIFIERS)}{nearest(name, VERIFIERS)}; "
            f"a function of your own is given by {FLAG}"
        )
    return VERIFIERS[name]


def custom(function: Callable[[str, str], object], custom_path: str) -> Verifier:
    """The user's function as a verifier; what it returns must be a number, else ConfigError."""

    def verify(response_text: str, label: str) -> float:
        reward = function(response_text, label)
        if not isinstance(reward, Real):
            raise ConfigError(
                f"{FLAG} = {custom_path!r}: returned {reward!r:.80}; a number is needed"
            )
        return float(reward)

    return verify
