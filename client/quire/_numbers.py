"""Checks numbers that callers pass to code without a wire format: digests, planner, engine."""

from __future__ import annotations

import operator
from typing import Any, Final

LARGEST: Final = 2**62  # limit for counts of tokens, blocks and bytes, so that a sum of several still fits into 64 bits


def require_integer(name: str, value: Any, low: int = 0, high: int = LARGEST) -> None:
    """Checks that a value is an integer from `low` to `high`, of Python or numpy.

    Raises:
        TypeError: the value is not an integer. True and False are not integers here.
        ValueError: the value is out of range.
    """
    if type(value) is int and low <= value <= high:
        return
    what = f"{name} must be an integer from {low} to {high}, not {shown(value)}"
    if isinstance(value, bool):
        raise TypeError(what)
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(what) from None
    if not low <= number <= high:
        raise ValueError(what)


def require_share(name: str, value: Any) -> None:
    """Checks that a value is a number from 0 to 1.

    Raises:
        TypeError: the value is not a number. True and False are not numbers here.
        ValueError: the value is out of range, or not finite.
    """
    what = f"{name} must be from 0 to 1, not {shown(value)}"
    if isinstance(value, (bool, str, bytes, bytearray)) or not hasattr(value, "__float__"):
        raise TypeError(what)
    if not 0 <= value <= 1:
        raise ValueError(what)


def shown(value: object) -> str:
    """Returns the repr of a caller's value, cut after 80 characters."""
    try:
        return f"{value!r:.80}"
    except ValueError:  # Python refuses to format an integer of more than 4,300 digits.
        return "a number with thousands of digits"
