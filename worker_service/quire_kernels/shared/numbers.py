"""Checks of callers' numbers, before a kernel or a work division uses them."""

from __future__ import annotations

import math
import operator
from typing import Any, Final

LARGEST: Final = 2**31 - 1  # limit of heads, dimensions and tokens: kernels count in 32 bits


def require_integer(name: str, value: Any, low: int) -> int:
    """Returns `value` as a Python integer from `low` to `LARGEST`; numpy's integers are accepted too.

    Raises:
        TypeError: the value is not an integer. True and False do not count as integers.
        ValueError: the value is out of range.
    """
    if type(value) is int and low <= value <= LARGEST:
        return value
    try:
        number = operator.index(value)
    except (TypeError, RuntimeError):  # torch raises RuntimeError for tensors of several entries
        number = None
    if number is None or isinstance(value, bool):
        raise TypeError(f"{name} must be an integer, not {_shown(value)}")
    if number < low:
        raise ValueError(f"{name} must be at least {low}, not {_shown(value)}")
    if number > LARGEST:
        raise ValueError(f"{name} must be at most {LARGEST}, not {_shown(value)}")
    return number


def require_sizes(**sizes: Any) -> tuple[int, ...]:
    """Returns integers that are at least 1, in order.

    Raises:
        TypeError, ValueError: see `require_integer`.
    """
    return tuple(require_integer(name, size, 1) for name, size in sizes.items())


def require_finite(name: str, value: Any) -> float:
    """Returns a finite number.

    Raises:
        TypeError: the value is not a number. True and False do not count as numbers.
        ValueError: the value is NaN or infinite, or an integer too large for a float.
    """
    if isinstance(value, (bool, str, bytes, bytearray)) or not hasattr(value, "__float__"):
        raise TypeError(f"{name} must be a number, not {_shown(value)}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"{name} must be finite, not {_shown(value)}")
    return number


def _shown(value: object) -> str:
    """Returns the repr of a value, cut after 80 characters."""
    try:
        return f"{value!r:.80}"
    except ValueError:  # Python refuses to print integers of more than 4,300 digits
        return "a number with thousands of digits"
