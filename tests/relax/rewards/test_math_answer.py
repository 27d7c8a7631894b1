import json
import time
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relax.rewards.math_answer import final_answer, math_answer, parse_number

GSM8K = Path(__file__).parents[3] / "../shared/data/gsm8k"


@pytest.mark.parametrize(
    "text",
    ["1000", "1,000", "1000.0", "$1000", "\\$1,000.00", "1000 dollars", "1{,}000", "1\\,000",
     "10,\\!000/10", "1e3", "1000%", "1000\\%", "+1000", " 1000. ", "**1000**", "\\(1000\\)",
     "x = 1000", "500 + 500 = 1000", "1000 \\text{ km}", "\\text{1000}", "1 thousand", "1000km",
     "1000 m^2", "1000 m\u00b2", "1000 miles per hour", "1000^\\circ", "2000/2", "\\frac{2000}{2}",
     "\u20ac1000", "1000 km/h", "1000 cubic cm^{3}"],
)  # fmt: skip
def test_all_are_one_thousand(text):
    assert parse_number(text) == 1000


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("-5", Fraction(-5)),
        ("\u22125", Fraction(-5)),
        ("-$5", Fraction(-5)),
        ("- 5", Fraction(-5)),
        (".5", Fraction(1, 2)),
        ("1/3", Fraction(1, 3)),
        ("\\frac{1}{3}", Fraction(1, 3)),
        ("-\\dfrac{1}{3}", Fraction(-1, 3)),
        ("\\frac13", Fraction(1, 3)),
        ("3 1/2", Fraction(7, 2)),
        ("-3\\frac{1}{2}", Fraction(-7, 2)),
        ("1.5 million", Fraction(1_500_000)),
        ("2 hundred", Fraction(2)),
        ("0.1", Fraction(1, 10)),
        ("2.50", Fraction(5, 2)),
        ("3/4 of the cake", Fraction(3, 4)),
        ("10 eggs and pans", Fraction(10)),
        ("123456789012345678901234567890", Fraction(123456789012345678901234567890)),
    ],
)
def test_values(text, value):
    assert parse_number(text) == value


@pytest.mark.parametrize(
    "text",
    ["", " ", "x", "-", "$", "1 2", "18 or 20", "18 or so", "18$20", "1,00", "1,2345", "1,2",
     "5-10", "18/", "18-", "1/0", "1/2/3", "12:30", "2\\pi", "2 pi", "2\\sqrt{3}", "10x",
     "10 x", "2x^2", "5^2",
     "5\u00b2", "5 squared", "5 thousand million eggs million", "six", "\u0663",
     "\u00b2", "1e9999", "nan", "inf", "--5", "5 and a half", "1" * 257,
     "\\frac{1}{}", "1_000", "0x10", "1/2 1/2"],
)  # fmt: skip
def test_what_is_no_number(text):
    assert parse_number(text) is None


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("so 3 + 4 = 7\n#### 7", " 7"),
        ("#### 5\nno, wait\n#### 7\nbye 9", " 7"),
        ("####\n\n 7\nbye", "7"),
        ("first \\boxed{5}, then \\boxed{\\frac{1}{2}}.", "\\frac{1}{2}"),
        ("\\boxed{\\boxed{7}}", "7"),
        ("#### 5\n\\boxed{7}", "7"),
        ("\\boxed{5}\n#### 7", " 7"),
        ("\\boxed{5}\n#### Check", "5"),
        ("#### Answer\n\\boxed{a,b}", "a,b"),
        ("7", None),
        ("the answer is 7", None),
        ("\\boxed{7", None),
        ("\\boxed{" + "7" * 300 + "}", None),
    ],
)
def test_final_answer(text, answer):
    found = final_answer(text)
    assert (found and found.strip()) == (answer and answer.strip())


@pytest.mark.parametrize(
    ("response", "label", "reward"),
    [
        ("#### 1,000", "1000", 1.0),
        ("\\boxed{50\\%}", "50", 1.0),
        ("\\boxed{0.5}", "50%", 0.0),
        ("\\boxed{0.5}", "\\frac{1}{2}", 1.0),
        ("\\boxed{0.333}", "1/3", 0.0),
        ("1000", "1000", 0.0),
        ("#### 7", "3 + 4 = 7 so\n#### 7", 1.0),
        ("#### 7", "#### 8", 0.0),
        ("#### 7", "the box is \\boxed{7}", 1.0),
        ("\\boxed{2\\sqrt{3}}", "$2 \\sqrt{3}$", 1.0),
        ("\\boxed{\\left(1, 2\\right)}", "(1,2)", 1.0),
        ("\\boxed{(1,3)}", "(1,2)", 0.0),
        ("\\boxed{2}", "2\\pi", 0.0),
        ("\\boxed{2\\pi}", "2", 0.0),
        ("\\boxed{}", "", 0.0),
        ("####", "", 0.0),
        ("", "", 0.0),
        ("#### 1 2 3 4 5 6 7", "7", 0.0),
    ],
)
def test_rewards(response, label, reward):
    assert math_answer(response, label) == reward


@settings(max_examples=200, deadline=None)
@given(st.integers(-(10**9), 10**9), st.integers(1, 10**6))
def test_equal_fractions_in_any_writing(numerator, denominator):
    sign = "-" if numerator < 0 else ""
    size = abs(numerator)
    label = f"{numerator}/{denominator}"
    for text in (
        f"{3 * numerator}/{3 * denominator}",
        f"{sign}\\frac{{{size:,}}}{{{denominator}}}",
        f"{sign}${size}/{denominator} dollars",
    ):
        assert math_answer(f"#### {text}", label) == 1.0
    assert math_answer(f"#### {numerator + 1}/{denominator}", label) == 0.0


PIECES = st.sampled_from(
    ["####", "\\boxed{", "}", "{", "\\frac", "\\text{", "\n", " ", "-", "/", ",", ".", "=", "$",
     "0", "1", "9", "e", "E", "e9", "m", "^2", "\u00b2", "\u0663", "million ", "\ud800", "\0"]
)  # fmt: skip


@settings(max_examples=500, deadline=None)
@given(st.lists(PIECES, max_size=30).map("".join), st.lists(PIECES, max_size=6).map("".join))
def test_no_text_raises(response, label):
    assert math_answer(response, label) in (0.0, 1.0)
    assert math_answer("#### " + response, label) in (0.0, 1.0)


@pytest.mark.parametrize(
    "text",
    ["\\boxed{" * 100_000, "#" * 1_000_000, "#### " + "9" * 1_000_000, "#### " + "1," * 500_000,
     "#### " + "a" * 250 + "1", "#### 1 " + "a " * 120 + "!1", "#### " + "\\frac{" * 40,
     "#### " + "1 " * 125, "#### 1e999/1e999", "#### " + "1" * 128 + "/" + "1" * 127,
     "#### " + " " * 250 + "x", "\\boxed{" + "{" * 1_000_000, "#### " + "\n" * 1_000_000],
)  # fmt: skip
def test_hostile_text_ends_quickly(text):
    began = time.perf_counter()
    for _ in range(10):
        assert math_answer(text, "2") == 0.0
    assert time.perf_counter() - began < 0.5


@pytest.mark.parametrize("split", ["train", "test"])
def test_every_gsm8k_answer_against_its_own_and_a_shifted_label(split):
    if not GSM8K.is_dir():
        pytest.skip(f"{GSM8K}: download GSM8K train.jsonl and test.jsonl there")
    rows = [json.loads(line) for line in (GSM8K / f"{split}.jsonl").read_text().splitlines()]
    assert len(rows) == {"train": 7473, "test": 1319}[split]
    for row in rows:
        text = row["answer"]
        number = int(text.partition("####")[2].replace(",", ""))
        assert math_answer(text, text) == 1.0
        assert math_answer(text, str(number)) == 1.0
        assert math_answer(f"so \\boxed{{{number}.0}}", text) == 1.0
        assert math_answer(text, str(number + 1)) == 0.0
        assert math_answer(text, text.partition("####")[0] + f"#### {number - 1}") == 0.0
