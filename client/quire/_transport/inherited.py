"""Keeps forked children away from their parent's gRPC, which does not work after a fork.

A child has none of gRPC's threads, but its locks and its epoll set, and that set is still the parent's. A new channel
in the child would abort on a lock, or put its sockets into the parent's epoll set, which then crashes the parent. So a
child refuses to make channels if gRPC ran at the fork. gRPC runs while a process has channels, and some milliseconds
longer. `GRPC_ENABLE_FORK_SUPPORT` is no remedy: with channels of asyncio, children and parents still crash.

A child must not touch inherited calls and channels either. When a child ends, it cancels its event loop's tasks and
collects its objects. Both steps would cancel calls and close channels, which deadlocks on a lock that a parent's thread
held at the fork, or ends the parent's connection.
"""

from __future__ import annotations

import ctypes
import math
import os
import time
import weakref
from pathlib import Path
from typing import Any, Final, TypeVar

from quire.errors import UsageError

REMEDY: Final = (
    "gRPC does not work in a process forked from one with clients: start processes with multiprocessing's "
    "'spawn' or 'forkserver', or fork before the first client is made"
)
_THREADS: Final = Path("/proc/self/task")
_THREAD_NAMES: Final = (b"event_engine", b"grpc_", b"lifeguard")
_ENDING_S_MAX: Final = 1.0  # gRPC's threads end within 5 ms of the last channel's close; more on a loaded machine.

CallT = TypeVar("CallT")
ChannelT = TypeVar("ChannelT")


class _Inheritance:
    """Knows this process's calls and channels, and whether gRPC ran when this process was forked.

    Lifecycle:
    1. noted     calls, and channels while they are open
    2. forking   `look` waits for gRPC to end if the last channel was just closed, then notes whether it runs
    3. inherited in the child, `take` makes the noted calls and channels live forever, and removes them from the notes
    """

    def __init__(self) -> None:
        self.calls: weakref.WeakSet[Any] = weakref.WeakSet()
        self.channels: weakref.WeakSet[Any] = weakref.WeakSet()
        self.is_refused = False
        self.closed_at = -math.inf
        self._has_run = False
        self._ran: bool | None = None  # whether gRPC ran at the current fork; None if `look` was not called

    def note(self, channel: Any) -> None:
        """Notes an open channel."""
        self.channels.add(channel)
        self._has_run = True

    def look(self) -> None:
        """Notes before a fork whether gRPC runs."""
        until = self.closed_at + _ENDING_S_MAX
        while (runs := self._runs()) and not self.channels and time.monotonic() < until:
            time.sleep(0.001)
        self._ran = runs

    def leave(self) -> None:
        """Forgets in the parent what `look` noted for a fork."""
        self._ran = None

    def take(self) -> None:
        """Keeps inherited calls and channels alive in a child, and makes canceling a call do nothing."""
        # A fork in C may skip `look`. Then gRPC counts as running if this process has made a channel.
        self.is_refused |= self._has_run if self._ran is None else self._ran
        for kept in (*self.calls, *self.channels):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))
        for call in self.calls:
            call.cancel = _cancel_nothing
        self.calls.clear()
        self.channels.clear()
        self.closed_at, self._has_run, self._ran = -math.inf, False, None

    def _runs(self) -> bool:
        """Tells whether gRPC has threads. Without /proc, gRPC counts as running once a channel was made."""
        if not _THREADS.is_dir():
            return self._has_run
        for thread in _THREADS.iterdir():
            try:
                name = (thread / "comm").read_bytes()  # bytes, because Linux may cut a long name inside a character
            except OSError:
                continue  # This thread has just ended.
            if name.startswith(_THREAD_NAMES):
                return True
        return False


_INHERITANCE: Final = _Inheritance()


def inheritable(call: CallT) -> CallT:
    """Returns a blocking or asyncio call made safe for children that this process forks while the call is alive."""
    _INHERITANCE.calls.add(call)
    return call


def check_channels_work() -> None:
    """Refuses a new channel in a forked child that gRPC would crash, together with its parent.

    Raises:
        UsageError: gRPC ran in the parent when this process was forked.
    """
    if _INHERITANCE.is_refused:
        raise UsageError(REMEDY)


def opened(channel: ChannelT) -> ChannelT:
    """Returns a new channel made safe for children that this process forks while the channel is open."""
    _INHERITANCE.note(channel)
    return channel


def closed(channel: object) -> None:
    """Notes that a channel is closed."""
    _INHERITANCE.channels.discard(channel)
    _INHERITANCE.closed_at = time.monotonic()


def _cancel_nothing(*_: object) -> bool:
    return False


# Windows does not fork.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_INHERITANCE.look, after_in_parent=_INHERITANCE.leave, after_in_child=_INHERITANCE.take)
