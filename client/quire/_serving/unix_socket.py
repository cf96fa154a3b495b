"""A Unix socket has one server at a time. Apart from addresses, which clients read on systems without `fcntl`, too."""

from __future__ import annotations

import fcntl
import os

from quire.errors import UsageError


def hold_socket(address: str) -> int:
    """Keeps the socket of `unix:path` or `unix:///path` for this process; returns a file descriptor, to be closed.

    gRPC would take the path from a process that listens there already. The lock ends with the process, however it
    ends. Its file stays, because a process that removes it may remove the file of its successor.

    Raises:
        UsageError: another process holds it, the lock cannot be had, or there is no path.
    """
    path = address.removeprefix("unix:").removeprefix("//")
    if not path:
        raise UsageError(f"cannot listen on {address}: it names no file")
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
