"""How long a call may take, in numbers that gRPC understands."""

from __future__ import annotations

from typing import Final

from quire.errors import InvalidArgumentError, Reason

TIMEOUT_S_MAX: Final = 1e8  # three years; gRPC takes much longer ones for none at all


def checked_timeout(timeout_s: float) -> float:
    """Returns what gRPC takes for a deadline in so many seconds; infinity is three years.

    Raises:
        InvalidArgumentError: BAD_PARAMETER, it is less than 0, or no number.
    """
    if not timeout_s >= 0:
        raise InvalidArgumentError(f"timeout_s must be 0 or more seconds, not {timeout_s}", Reason.BAD_PARAMETER)
    return min(timeout_s, TIMEOUT_S_MAX)
