"""Imports grpc on that of its two I/O engines which suits sessions. The package imports this before anything else.

Since 1.80 gRPC for Python has its EventEngine: one thread waits for sockets, one of a pool reads, and hands on to the
thread that completes calls, which wakes the event loop. Before, the thread that completes calls read the socket itself.
For the small messages of a session the additional hand-overs cost a fifth of a server's CPU and of a round trip
(docs/decisions/0015-threads-that-do-not-interrupt-each-other.md). The older engine is asked for where

- grpc is not imported yet: it reads its choice once, and an application that uses gRPC itself has chosen by then;
- GRPC_EXPERIMENTS is not set: who sets it, even to nothing, decides;
- this release of gRPC is known to have both: one that has not complains about the names on standard error.

The variable is set during the import only, so that no child process inherits it.

So is GRPC_VERBOSITY, to NONE. gRPC writes to standard error for each handshake that fails and each header that it
cannot read, which strangers can send, from the thread that serves the socket: a server would stand still where nobody
reads its output. What is wrong with a call is in the call's status, too.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import Final

_VARIABLE: Final = "GRPC_EXPERIMENTS"
_WITHOUT_EVENT_ENGINE: Final = "-event_engine_listener,-event_engine_client"
LAST_WITH_BOTH: Final = (1, 85)  # newest release known to have both


def is_at_most(release: tuple[int, int]) -> bool:
    """Tells whether the installed gRPC is this release or an older one; False where it cannot be told."""
    try:
        major, minor, *_ = version("grpcio").split(".")
        return (int(major), int(minor)) <= release
    except (PackageNotFoundError, ValueError):  # Another package bundles gRPC, or the version's form is unknown.
        return False


@contextlib.contextmanager
def _set_meanwhile(**variables: str) -> Iterator[None]:
    """Sets those of the variables that the environment does not have."""
    new = {name: value for name, value in variables.items() if name not in os.environ}
    os.environ.update(new)
    try:
        yield
    finally:
        for name in new:
            del os.environ[name]


if "grpc" not in sys.modules:
    engines = {_VARIABLE: _WITHOUT_EVENT_ENGINE} if is_at_most(LAST_WITH_BOTH) else {}
    with _set_meanwhile(GRPC_VERBOSITY="NONE", **engines):
        import grpc  # noqa: F401
