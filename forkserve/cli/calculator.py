"""Arithmetic without `eval`: numbers, + - * / // % **, brackets, and nothing else."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable

__all__ = ["calculate"]

Number = int | float

_BINARY: dict[type[ast.operator], Callable[[Number, Number], Number]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_MAX_LENGTH = 200
_MAX_DEPTH = 40
_MAX_BITS = 256  # of any integer on the way
_MAX_POWER = 64


def calculate(expression: str) -> str:
    """The value as text.  ValueError for what is not arithmetic, ArithmeticError as in Python."""
    if len(expression) > _MAX_LENGTH:
        raise ValueError(f"an expression has at most {_MAX_LENGTH} characters")
    try:
        tree = ast.parse(expression.strip(), mode="eval")
    except (SyntaxError, RecursionError, MemoryError, ValueError) as error:
        raise ValueError(f"{expression!r} is not an expression") from error
    value = _value(tree.body, 0)
    return str(value) if isinstance(value, int) else f"{value:.6g}"


def _value(node: ast.expr, depth: int) -> Number:
    if depth > _MAX_DEPTH:
        raise ValueError("the expression is nested too deeply")
    match node:
        case ast.Constant(value=value) if type(value) in (int, float):
            assert isinstance(value, int | float)
            return _bounded(value)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand, depth + 1)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _value(operand, depth + 1)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            a, b = _value(left, depth + 1), _value(right, depth + 1)
            if isinstance(op, ast.Pow) and (abs(b) > _MAX_POWER or (a < 0 and b != int(b))):
                raise ValueError(f"{a} ** {b} is out of range")
            return _bounded(_BINARY[type(op)](a, b))
    raise ValueError(f"'{ast.unparse(node)}' is not arithmetic")


def _bounded(value: Number) -> Number:
    if isinstance(value, int) and value.bit_length() > _MAX_BITS:
        raise ValueError("a number on the way is too large")
    return value
