"""For all tests."""

from __future__ import annotations

import signal


def pytest_configure() -> None:
    """A shell ignores SIGINT in what it starts in the background, and so would every process that tests interrupt."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
