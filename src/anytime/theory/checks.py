"""Arguments of the formulas: what is legal, said in the error."""

from __future__ import annotations

import math
from collections.abc import Callable

Check = Callable[[float], bool]

LEGAL: dict[str, tuple[Check, str]] = {
    "[0, ∞)": (lambda v: v >= 0, "in [0, ∞)"),
    "(0, ∞)": (lambda v: v > 0, "in (0, ∞)"),
    "[0, 1)": (lambda v: 0 <= v < 1, "in [0, 1)"),
    "[0, 1]": (lambda v: 0 <= v <= 1, "in [0, 1]"),
    "(0, 1)": (lambda v: 0 < v < 1, "in (0, 1)"),
    "(0, 1]": (lambda v: 0 < v <= 1, "in (0, 1]"),
    "[-1, 1]": (lambda v: -1 <= v <= 1, "in [-1, 1]"),
}


def number(name: str, value: float, interval: str) -> float:
    """The value, if it is a finite number of the interval."""
    check, legal = LEGAL[interval]
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or not check(value):
        raise ValueError(f"{name} is {value!r}; it must be a number {legal}")
    return value


def whole(name: str, value: int, low: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise ValueError(f"{name} is {value!r}; it must be a whole number in [{low}, ∞)")
    return value


def choice(name: str, value: str, choices: tuple[str, ...]) -> str:
    if value not in choices:
        raise ValueError(f"{name} is {value!r}; it must be one of {', '.join(map(repr, choices))}")
    return value
