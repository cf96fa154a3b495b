"""Imports grpc on that of its two I/O engines which suits sessions. The package imports this before anything else.

Since 1.80 gRPC for Python has its EventEngine: one thread waits for sockets, one of a pool reads, and hands on to the
thread that completes calls, which wakes the event loop. Before, the thread that completes calls read the socket itself.
For the small messages of a session the additional hand-overs cost a fifth of a server's CPU and of a round trip
(docs/decisions/0015-threads-that-do-not-interrupt-each-other.md). The older engine is asked for where

- grpc is not imported yet: it reads its choice once, and an application that uses gRPC itself has chosen by then;
- GRPC_EXPERIMENTS is not set: who sets it, even to nothing, decides;
- this release of gRPC is known to have both: one that has not complains about the names on standard error.

The variable is set during the import only, so that no child process inherits it.
"""

from __future__ import annotations

import os
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Final

_VARIABLE: Final = "GRPC_EXPERIMENTS"
_WITHOUT_EVENT_ENGINE: Final = "-event_engine_listener,-event_engine_client"
LAST_WITH_BOTH: Final = (1, 85)  # that is known


def is_at_most(release: tuple[int, int]) -> bool:
    """Tells whether the installed gRPC is this release or an older one; False where it cannot be told."""
    try:
        major, minor, *_ = version("grpcio").split(".")
        return (int(major), int(minor)) <= release
    except (PackageNotFoundError, ValueError):  # built into something else, or of a form that nobody has seen yet
        return False


if "grpc" not in sys.modules and _VARIABLE not in os.environ and is_at_most(LAST_WITH_BOTH):
    os.environ[_VARIABLE] = _WITHOUT_EVENT_ENGINE
    try:
        import grpc  # noqa: F401
    finally:
        del os.environ[_VARIABLE]
