"""Ensures that a Unix socket has one server at a time.

This module is separate from `quire._transport.address`, because clients import that module on systems without `fcntl`.
"""

from __future__ import annotations

import fcntl
import os

from quire.errors import UsageError


def hold_socket(address: str) -> int:
    """Locks the socket of `unix:path` or `unix:///path` for this process. Returns a file descriptor for the caller to
    close.

    Without the lock, gRPC would take the path over from a process that already listens there. The kernel releases the
    lock when the process ends. The lock's file stays: a process that removes it might remove its successor's.

    Raises:
        UsageError: another process holds the lock, the lock file cannot be used, or the address has no path.
    """
    path = address.removeprefix("unix:").removeprefix("//")
    if not path:
        raise UsageError(f"cannot listen on {address}: the address names no file")
    lock = None
    try:
        lock = os.open(f"{path}.lock", os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if lock is not None:
            os.close(lock)
        held = isinstance(error, BlockingIOError)
        reason = "another server listens there" if held else f"{path}.lock: {error.strerror}"
        raise UsageError(f"cannot listen on {address}: {reason}") from None
    return lock
