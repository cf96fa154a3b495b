"""Logs why an owner waits for its pool. Sessions without an `on_wait` use this."""

from __future__ import annotations

import logging
from typing import Final

from quire.errors import QuireError, Reason

log = logging.getLogger(__name__)

_LEASE_RUNS: Final = frozenset({Reason.POOL_OWNED})


class Waits:
    """Logs each reason once as a warning, and later that the session is attached again.

    Args:
        pool: the pool's name.
    """

    def __init__(self, pool: str) -> None:
        self._pool = pool
        self._told: set[Reason | None] = set()

    def __call__(self, error: QuireError) -> None:
        if error.reason in self._told:
            return
        self._told.add(error.reason)
        why = "no server answers at the allocator's address" if error.is_grpcs_own else error
        until = (
            ("its owner closes it, or the lease of its silent owner ends")
            if error.reason in _LEASE_RUNS
            else "an allocator serves it"
        )
        log.warning("pool %s is not attached: %s; waiting until %s", self._pool, why, until)

    def attached(self) -> None:
        """Logs that the session is attached again, if its absence was logged."""
        if self._told:
            log.warning("pool %s is attached again", self._pool)
            self._told.clear()
