"""Protects gRPC calls that a forked child inherits from its parent. The child must not touch them.

When a child ends, the child cancels its event loop's tasks and collects its objects. Both actions would cancel
inherited calls. Canceling them can deadlock on a lock that a parent's thread held at the fork, or crash in a gRPC core
that does not work in the child.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from typing import Any, Final, TypeVar

CallT = TypeVar("CallT")
_CALLS: Final[weakref.WeakSet[Any]] = weakref.WeakSet()


def inheritable(call: CallT) -> CallT:
    """Returns a blocking or asyncio call made safe for children that this process forks while the call is alive."""
    _CALLS.add(call)
    return call


def _leave_alone() -> None:
    """Keeps inherited calls alive forever, and makes canceling one do nothing."""
    for call in _CALLS:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(call))
        call.cancel = _cancel_nothing


def _cancel_nothing(*_: object) -> bool:
    return False


os.register_at_fork(after_in_child=_leave_alone)
