"""pytest hooks for all tests."""

from __future__ import annotations

import signal


def pytest_configure() -> None:
    """Restores SIGINT. A shell ignores it in background processes, and so would every child that tests interrupt."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
