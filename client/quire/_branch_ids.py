"""Ids of the branches to renew: their handles are alive and not released."""

from __future__ import annotations

import threading
import weakref
from typing import Any, Final

BRANCH_TTL_S: Final = 60.0  # default time for which a worker keeps a branch after the last call that named it


class OpenBranches:
    """Weak references to the open handles of branches with one time to live.

    Thread-safe: one thread renews all branches while others fork and release.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._handles: weakref.WeakValueDictionary[bytes, Any] = weakref.WeakValueDictionary()

    def add(self, handle: Any) -> None:
        """Adds a handle, so that its branch is renewed."""
        with self._lock:
            self._handles[handle.id] = handle

    def discard(self, branch_id: bytes) -> None:
        """Removes a branch that is released, or unknown to the worker."""
        with self._lock:
            self._handles.pop(branch_id, None)

    def ids(self) -> list[bytes]:
        """Returns the ids of all branches to renew."""
        with self._lock:
            return list(self._handles)
