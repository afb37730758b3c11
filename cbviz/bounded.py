"""Arithmetic with a limit on its cost, for expressions that may come from anybody. Knows no traces.

A watch or a breakpoint's condition is computed again at every step. Three limits keep one evaluation small:

    parts    each part of an expression is computed once, and there are at most MOST_PARTS of them, nested at most MOST_DEPTH deep
    size     a whole number has at most MOST_BITS bits, before an operation and after it
    places   `round` takes at most MOST_PLACES places: Python computes 10 ** places for a whole number

No limit on time is needed: no allowed operation on such operands takes longer than a few microseconds.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any

MOST_PARTS = 80
MOST_DEPTH = 24
MOST_BITS = 1024
MOST_PLACES = 308
_SIGNS = (ast.expr_context, ast.operator, ast.unaryop, ast.cmpop, ast.boolop)


class BudgetError(ValueError):
    """An expression costs more than it may. Names the limit and the value that is above it."""


def check_shape(tree: ast.AST) -> None:
    """Raise BudgetError for an expression with too many parts, or too deeply nested ones."""
    level, parts, depth = [tree], 0, 0
    while level:
        parts += len(level)
        depth += 1
        if parts > MOST_PARTS:
            raise BudgetError(
                f"it has more than {MOST_PARTS} parts (names, numbers and operations); write a shorter one"
            )
        if depth > MOST_DEPTH:
            raise BudgetError(f"it is nested more than {MOST_DEPTH} deep; write a flatter one")
        level = [
            child for node in level for child in ast.iter_child_nodes(node) if not isinstance(child, _SIGNS)
        ]


def limited(value: Any) -> Any:
    """Return `value`. Raise BudgetError if it is a whole number of more than MOST_BITS bits."""
    if isinstance(value, int) and (bits := value.bit_length()) > MOST_BITS:
        raise BudgetError(
            f"a number in it has {bits:,} bits, the most is {MOST_BITS:,}; divide by something first"
        )
    return value


def computed(operation: Callable[..., Any], *values: Any) -> Any:
    """Return what the operation makes of the numbers, within the limit of size; None where it is undefined,
    as a division by zero is.
    """
    for value in values:
        limited(value)
    try:
        result = operation(*values)
    except (
        ArithmeticError,
        ValueError,
    ):  # a division by zero, a result beyond the largest float, the nearest whole number of infinity
        return None
    return limited(result)


def rounded(value: Any, places: Any) -> Any:
    """Return `value` rounded to `places` places, None where that is undefined.

    Raise BudgetError for more places than MOST_PLACES.
    """
    try:
        count = int(limited(places))
    except BudgetError:
        raise
    except (ArithmeticError, ValueError):
        return None
    if abs(count) > MOST_PLACES:
        raise BudgetError(f"round takes -{MOST_PLACES} to {MOST_PLACES} places, here they are {count}")
    return computed(round, value, count)
