"""Imports grpc with the older of its two I/O engines. The package imports this module before anything else.

Since 1.80, gRPC for Python has an EventEngine: one thread waits for sockets, a pool's thread reads, and a third thread
completes calls and wakes the event loop. In the older engine, the thread that completes calls reads the socket itself.
For a session's small messages the extra hand-overs cost a fifth of a server's CPU and of a round trip
(docs/decisions/0015-threads-that-do-not-interrupt-each-other.md). This module selects the older engine if

- grpc is not imported yet: gRPC reads the setting only once, at its import;
- GRPC_EXPERIMENTS is not set: a user's value, even an empty one, takes precedence;
- the gRPC release is known to have both engines: other releases warn about unknown names on standard error.

The variable is set only during the import, so that no child process inherits it.

During the import GRPC_VERBOSITY is also set, to NONE. Otherwise gRPC writes to standard error for each failed handshake
and each unreadable header, from the thread that serves the socket. Any remote caller can cause such messages. If
nothing reads the server's output, the server would block. A call's status has its error, too.
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
LAST_WITH_BOTH: Final = (1, 85)  # newest tested release that has both engines


def is_at_most(release: tuple[int, int]) -> bool:
    """Tells whether the installed gRPC is at most this release. False if its version is unknown."""
    try:
        major, minor, *_ = version("grpcio").split(".")
        return (int(major), int(minor)) <= release
    except (PackageNotFoundError, ValueError):  # Another package bundles gRPC, or the version's form is unknown.
        return False


@contextlib.contextmanager
def _set_meanwhile(**variables: str) -> Iterator[None]:
    """Sets variables that the environment lacks, and removes them at the end."""
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
