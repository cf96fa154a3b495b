"""When a lease is over: not before all that came in time has been read, and never because of this process's own stalls.

Pure: time comes with every call; `server.py` makes one check after the other.
"""

from __future__ import annotations

from collections.abc import Callable

from quire_allocator.core.ownership.directory import Directory


class LeaseWatch:
    """Ends leases in checks that are to come every `period_s` seconds.

    - Time by which a check is late is time in which this process stood still and heard nobody: every lease grows by it.
    - A check ends only leases that were over at the check before. What arrived until then has been read meanwhile.

    So a silent owner keeps its pool for its lease and up to two periods more.
    """

    def __init__(self, directory: Directory, expire: Callable[[float], object], period_s: float, now: float) -> None:
        self._directory = directory
        self._expire = expire
        self._period_s = period_s
        self._checked_at = now

    def check(self, now: float) -> None:
        """One check; `expire` is called with the time up to which leases are over."""
        stalled_s = now - self._checked_at - self._period_s
        if stalled_s > 0:
            self._directory.extend_leases(stalled_s)
        self._expire(self._checked_at)
        self._checked_at = now
