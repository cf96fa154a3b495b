"""Calls of gRPC that a forked child inherits, and must not touch: they are its parent's.

A child that ends cancels the tasks of its event loop, and collects what it has. Either would cancel a call: under a
lock that a thread of the parent may hold, or in a core that no longer works there, which ends in a crash.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from typing import Any, Final, TypeVar

CallT = TypeVar("CallT")
_CALLS: Final[weakref.WeakSet[Any]] = weakref.WeakSet()


def inheritable(call: CallT) -> CallT:
    """Returns a call, of either flavour, that is safe in a child which this process forks while the call is alive."""
    _CALLS.add(call)
    return call


def _leave_alone() -> None:
    """Keeps calls from being collected, and makes cancelling one do nothing."""
    for call in _CALLS:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(call))
        call.cancel = _cancel_nothing


def _cancel_nothing(*_: object) -> bool:
    return False


os.register_at_fork(after_in_child=_leave_alone)
