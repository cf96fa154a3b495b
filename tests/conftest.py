"""pytest hooks for all tests."""

from __future__ import annotations

import re
import signal

import pytest


def pytest_configure() -> None:
    """Restores SIGINT, which a shell makes background processes and their children ignore. Tests interrupt children."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Refuses test names that differ between two runs (a set, an address): parallel processes would disagree."""
    changing = [item.nodeid for item in items if re.search(r"set\(\{| at 0x", item.nodeid)]
    if changing:
        raise pytest.UsageError(f"these tests have another name in each process; give their parameters ids: {changing}")
