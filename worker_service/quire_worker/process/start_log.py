"""Log lines of a worker's start: its progress, and its waiting for the allocator."""

from __future__ import annotations

import time
from collections.abc import Callable

import structlog
from quire.errors import QuireError

log = structlog.get_logger()

WAIT_LOG_S = 10.0


def progress_of(event: str) -> Callable[[int, int, str], None]:
    """Returns a function that logs progress."""
    return lambda done, total, title: log.info(event, done=done, total=total, next=title)


def log_waits() -> Callable[[QuireError], None]:
    """Returns a function that logs why the worker waits for the allocator: at once, and then every ten seconds."""
    last_s = -WAIT_LOG_S

    def log_wait(error: QuireError) -> None:
        nonlocal last_s
        now_s = time.monotonic()
        if now_s - last_s >= WAIT_LOG_S:
            last_s = now_s
            log.warning("waiting for the allocator", error=str(error))

    return log_wait
