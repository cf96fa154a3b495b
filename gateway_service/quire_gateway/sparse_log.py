"""Log lines that callers cause, at most one of each kind a minute: who calls often must not fill a disk."""

from __future__ import annotations

import time
from typing import Final

import structlog

log = structlog.get_logger()

INTERVAL_S: Final = 60.0
_last_s: dict[str, float] = {}
_left_out: dict[str, int] = {}


def log_sparsely(event: str, **values: object) -> None:
    """Logs a warning, unless one of that event was logged within a minute; the next says how many were left out.

    Args:
        event: one of a few constants.
        values: of this line.
    """
    now_s = time.monotonic()
    if now_s - _last_s.get(event, -INTERVAL_S) < INTERVAL_S:
        _left_out[event] = _left_out.get(event, 0) + 1
        return
    _last_s[event] = now_s
    left_out = _left_out.pop(event, 0)
    log.warning(event, **values, **({"left_out": left_out} if left_out else {}))
