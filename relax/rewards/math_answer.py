r"""The verifier "math": the final answer, after #### or in \boxed{}, compared as an exact number.

It never raises, whatever the text: only a piece of at most 256 characters is parsed.
"""

import re
from fractions import Fraction

MAX_ANSWER_LEN = 256
"""Characters; a longer answer is none. It also bounds the digits that are turned to integers."""

# Replaced in this order before a number is looked for. Currency becomes a space, not nothing, so
# that "18$20" is not read as 1820.
REPLACEMENTS = (
    ("{,}", ","),
    ("\\,", ""),
    ("\\!", ""),
    ("\\left", ""),
    ("\\right", ""),
    ("^{\\circ}", " "),
    ("^\\circ", " "),
    ("\u2212", "-"),
    *((mark, " ") for mark in ("\\$", "\\%", "\\(", "\\)", "\\[", "\\]", "\\;", "\\:", "\\ ")),
    *((mark, " ") for mark in "$%*`~\u20ac\u00a3\u00a5\u00b0\u00a0\u202f"),
)
WRAPPED = re.compile(r"\\(?:text|textbf|textrm|mathrm|mathbf|mbox)\s*\{([^{}]*)\}")
FRACTION = re.compile(r"\\[dt]?frac\s*(?:\{([^{}]*)\}\s*\{([^{}]*)\}|([0-9])\s*([0-9]))")
POWER = re.compile(r"(?<=[A-Za-z])(?:\^[23]|\^\{[23]\}|[\u00b2\u00b3])")

DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)"
NUMBER = rf"(?:{DIGITS}(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]{{1,3}}(?![0-9]))?"
VALUE = re.compile(
    rf"\s*(?P<sign>[+-]?)\s*(?:(?P<whole>{DIGITS})\s+(?=[0-9]+\s*/\s*[0-9]))?"
    rf"(?P<number>{NUMBER})(?:\s*/\s*(?P<denominator>{NUMBER}))?"
)

# Words may follow a number as its unit, set off by a space; these may touch it.
ATTACHED_UNIT = re.compile(
    "(?:[kcm]m|[km]g|ml|[mk]ph|lbs?|oz|ft|yd|mi|hrs?|mins?|sec|[ap]m|st|nd|rd|th)(?![A-Za-z])"
)
ONE_LETTER_UNITS = frozenset("mgshlL")
# A word that changes the value is not a unit.
NOT_A_UNIT = re.compile(
    "pi|sqrt|squared|cubed|plus|minus|times|over|choose|mod|factorial|log|ln|sin|cos|tan|exp|or|half"
)
MAGNITUDES = {"thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}


def math_answer(response_text: str, label: str) -> float:
    r"""Give 1.0 if the response's final answer equals the label's, else 0.0.

    The answer is what follows the last #### on its line, or stands in the last \boxed{}: the later
    one in the text that is a number. A response without either scores 0.0. A label without either
    is itself the answer. Numbers are compared as exact fractions: 1,000 = 1000.0 = $1000, 1/2 =
    0.5 = \frac{1}{2}; units and percent signs are stripped (50% = 50). Where neither side is a
    number, the texts are compared without spaces.
    """
    given, wanted = final_answer(response_text), final_answer(label) or label
    if given is None or not given.strip():
        return 0.0
    value, target = parse_number(given), parse_number(wanted)
    if value is None and target is None:
        return float(plain(given) == plain(wanted))
    return float(value == target)


def final_answer(text: str) -> str | None:
    r"""Give the piece after the last #### or in the last \boxed{}; None if there is neither."""
    pieces = [piece for piece in (after_hashes(text), in_box(text)) if piece is not None]
    pieces.sort(reverse=True)
    for _, piece in pieces:
        if parse_number(piece) is not None:
            return piece
    return pieces[0][1] if pieces else None


def after_hashes(text: str) -> tuple[int, str] | None:
    """Give place and rest of the line of the last ####; the answer may begin on the next line."""
    place = text.rfind("####")
    if place < 0:
        return None
    rest = text[place + 4 : place + 4 + 2 * MAX_ANSWER_LEN].lstrip()
    return place, rest.partition("\n")[0]


def in_box(text: str) -> tuple[int, str] | None:
    r"""Give place and content of the last \boxed{}; None if its braces do not close in time."""
    place = text.rfind("\\boxed{")
    if place < 0:
        return None
    start = place + len("\\boxed{")
    depth = 1
    for end in range(start, min(len(text), start + MAX_ANSWER_LEN + 1)):
        depth += (text[end] == "{") - (text[end] == "}")
        if depth == 0:
            return place, text[start:end]
    return None


def parse_number(text: str) -> Fraction | None:
    """Read a number with its unit as an exact fraction; None if the text is anything else."""
    if len(text) > MAX_ANSWER_LEN:
        return None
    for old, new in REPLACEMENTS:
        text = text.replace(old, new)
    text = WRAPPED.sub(r" \1 ", text)
    text = FRACTION.sub(lambda m: f" {m[1] or m[3] or ''}/{m[2] or m[4] or ''} ", text)
    text = text.rpartition("=")[2]
    found = VALUE.match(text)
    scale = unit_scale(text[found.end() :]) if found else None
    if found is None or scale is None:
        return None
    value, denominator = exact_value(found["number"]), exact_value(found["denominator"] or "1")
    if denominator == 0:
        return None
    value = exact_value(found["whole"] or "0") + value / denominator
    return (-value if found["sign"] == "-" else value) * scale


def exact_value(digits: str) -> Fraction:
    """Read digits with thousands separators, decimals and a short exponent."""
    return Fraction(digits.replace(",", ""))


def unit_scale(text: str) -> int | None:
    """Give what the text after a number multiplies it by: 1 for a unit; None if it is no unit."""
    text = POWER.sub("", text)
    # A slash or hyphen joins words of a unit; without one after it, something is missing.
    if re.search(r"[^A-Za-z\s/.,;:!'-]|[/-](?!\s*[A-Za-z])", text):
        return None
    if text[:1].isalpha() and not ATTACHED_UNIT.match(text):
        return None
    words = re.findall("[A-Za-z]+", text)
    scale = 1
    while words and words[0].lower() in MAGNITUDES:
        scale *= MAGNITUDES[words.pop(0).lower()]
    is_unit = all(
        (len(word) > 1 or word in ONE_LETTER_UNITS)
        and not NOT_A_UNIT.fullmatch(word.lower())
        and word.lower() not in MAGNITUDES
        for word in words
    )
    return scale if is_unit else None


def plain(text: str) -> str:
    """Give a text that is no number without spaces, dollar signs and a full stop at the end."""
    for old, new in (("\\left", ""), ("\\right", ""), ("\\dfrac", "\\frac"), ("\\tfrac", "\\frac")):
        text = text.replace(old, new)
    return "".join(text.replace("$", "").split()).rstrip(".")
