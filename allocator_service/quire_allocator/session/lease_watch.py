"""Ends leases only after reading every message that came in time, and never because this process itself stalled.

Pure: time comes with every call; `server.py` makes one check after the other.
"""

from __future__ import annotations

from collections.abc import Callable

from quire_allocator.core.ownership.directory import Directory


class LeaseWatch:
    """Ends leases in checks, which its caller makes every `period_s` seconds.

    - A late check shows that this process stalled and read nothing, so every lease is extended by the delay.
    - A check ends only leases that were over at the previous check: every message that arrived before that check has
      been read by now.

    So a silent owner keeps its pool for its lease and up to two periods more: with a lease of 10 s and a period of 0.5
    s, for 10 to 11 s.
    """

    def __init__(self, directory: Directory, expire: Callable[[float], object], period_s: float, now: float) -> None:
        self._directory = directory
        self._expire = expire
        self._period_s = period_s
        self._checked_at = now

    def check(self, now: float) -> None:
        """Makes one check at `now`, in seconds: calls `expire` with the time of the previous check."""
        stalled_s = now - self._checked_at - self._period_s
        if stalled_s > 0:
            self._directory.extend_leases(stalled_s)
        self._expire(self._checked_at)
        self._checked_at = now
