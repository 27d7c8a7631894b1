"""An example of `--custom-generate-function-path`: a calculator that the policy may call.

`relax.engines.calculator:generate`. The policy writes `<<48/2>>`; the calculator goes on with its
result, `24`, and the policy with that. Copy it as the start of a tool of your own.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from relax.engines.conversation import Conversation

OPEN, CLOSE = "<<", ">>"
MAX_TURNS = 8
MAX_LENGTH = 200
MAX_DIGITS = 50
OPERATIONS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}


async def generate(conversation: Conversation) -> None:
    """Turns of the policy, each call of the calculator answered, until it ends without one."""
    for _ in range(MAX_TURNS):
        turn = await conversation.sample(stop=(CLOSE,))
        if turn.finish_reason == "length" or not turn.text.endswith(CLOSE):
            return
        expression = conversation.text.removesuffix(CLOSE).rpartition(OPEN)[2]
        conversation.append(calculate(expression))


def calculate(expression: str) -> str:
    """`(1 + 2) * 4` -> `12`, exactly; `error` for anything but + - * / of numbers."""
    if len(expression) > MAX_LENGTH:
        return "error"
    try:
        value = _value(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, ValueError, ArithmeticError, RecursionError, MemoryError):
        return "error"
    if value.denominator == 1:
        return str(value.numerator)
    return f"{float(value):.6g}"


def _value(node: ast.AST) -> Fraction:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return _small(Fraction(str(node.value)))
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATIONS:
        return _small(OPERATIONS[type(node.op)](_value(node.left), _value(node.right)))
    if isinstance(node, ast.UnaryOp) and type(node.op) in OPERATIONS:
        return OPERATIONS[type(node.op)](_value(node.operand))
    raise ValueError("not arithmetic")


def _small(value: Fraction) -> Fraction:
    """Numbers that grow without end would take the sampler's time."""
    if max(abs(value.numerator), value.denominator) >= 10**MAX_DIGITS:
        raise OverflowError("too many digits")
    return value
