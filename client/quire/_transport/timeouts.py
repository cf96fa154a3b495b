"""Checks timeouts of calls, and converts them to numbers that gRPC accepts."""

from __future__ import annotations

from numbers import Real
from typing import Final

from quire._numbers import shown
from quire.errors import InvalidArgumentError, Reason

TIMEOUT_S_MAX: Final = 1e8  # three years; gRPC treats much longer timeouts as no timeout


def checked_timeout(timeout_s: float, name: str = "timeout_s") -> float:
    """Returns a timeout in seconds that gRPC accepts. Infinity becomes three years.

    Raises:
        InvalidArgumentError: BAD_PARAMETER, the timeout is below 0, or not a number.
    """
    is_number = isinstance(timeout_s, Real) and not isinstance(timeout_s, bool)
    if not is_number or not timeout_s >= 0:
        raise InvalidArgumentError(f"{name} must be 0 or more seconds, not {shown(timeout_s)}", Reason.BAD_PARAMETER)
    return float(min(timeout_s, TIMEOUT_S_MAX))
