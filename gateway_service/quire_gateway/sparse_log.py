"""Log lines that callers can cause: at most one of each kind per minute, so that callers cannot fill a disk."""

from __future__ import annotations

import time
from typing import Final

import structlog

log = structlog.get_logger()

INTERVAL_S: Final = 60.0
_last_s: dict[str, float] = {}
_left_out: dict[str, int] = {}


def log_sparsely(event: str, **values: object) -> None:
    """Logs a warning, at most once a minute for each event. The next line has the number of omitted ones.

    Args:
        event: one of a few constant texts.
        values: further values of the line.
    """
    now_s = time.monotonic()
    if now_s - _last_s.get(event, -INTERVAL_S) < INTERVAL_S:
        _left_out[event] = _left_out.get(event, 0) + 1
        return
    _last_s[event] = now_s
    left_out = _left_out.pop(event, 0)
    log.warning(event, **values, **({"left_out": left_out} if left_out else {}))
