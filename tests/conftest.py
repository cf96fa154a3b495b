"""For all tests."""

from __future__ import annotations

import signal


def pytest_configure() -> None:
    """Restores SIGINT, because a shell ignores it in background processes, and so would every process that tests
    interrupt."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
