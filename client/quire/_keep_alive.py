"""Renews leases of unary sessions in the background, three times per lease, until the session is closed or collected.

The renewing thread or task holds only a weak reference to the session. A session that its owner drops is thus garbage
collected: it emits a ResourceWarning, and its lease ends.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import warnings
import weakref
from collections.abc import Callable
from contextvars import copy_context
from typing import Any, Final

from quire._trace_context import NO_TRACE, carry
from quire.errors import QuireError, Reason

RENEWALS_PER_LEASE: Final = 3
# A renewal that is refused for one of these reasons is the last one: the session no longer exists.
GONE: Final = frozenset({Reason.SESSION_UNKNOWN, Reason.FENCED, Reason.POOL_UNKNOWN})

log = logging.getLogger(__name__)


def warn_unclosed(what: object) -> None:
    """Emits a ResourceWarning that an object was dropped without being closed. The object's `__del__` calls this."""
    warnings.warn(f"unclosed {what!r}", ResourceWarning, source=what, stacklevel=3)


class KeptByThread:
    """Renews a lease from a thread of its own.

    Args:
        session: the session. Its `keep_alive` renews the lease.
        lease_ms: length of the lease.
    """

    def __init__(self, session: Any, lease_ms: int) -> None:
        self._ended = threading.Event()
        arguments = (weakref.ref(session), lease_ms / 1000 / RENEWALS_PER_LEASE, self._ended)
        threading.Thread(target=_renew, args=arguments, name="quire-keep-alive", daemon=True).start()

    def stop(self) -> None:
        """Ends renewing. A running renewal does no harm."""
        self._ended.set()


class KeptByTask:
    """Renews a lease from a task of the running event loop. The arguments are the same as for `KeptByThread`."""

    def __init__(self, session: Any, lease_ms: int) -> None:
        context = copy_context()
        context.run(carry, NO_TRACE)  # Renewals do not belong to the request that began the lease.
        renewing = _renew_async(weakref.ref(session), lease_ms / 1000 / RENEWALS_PER_LEASE)
        self._task = asyncio.create_task(renewing, context=context)

    def stop(self) -> None:
        """Ends renewing. The loop may be closed already."""
        if not self._task.get_loop().is_closed():
            self._task.cancel()


def _renew(session: Callable[[], Any], interval_s: float, ended: threading.Event) -> None:
    while not ended.wait(interval_s):
        owner = session()
        if owner is None:
            return
        try:
            owner.keep_alive()
        except QuireError as error:
            if ended.is_set() or _is_gone(owner, error):
                return
        del owner  # A reference here would keep the session alive while this thread waits.


async def _renew_async(session: Callable[[], Any], interval_s: float) -> None:
    while True:
        await asyncio.sleep(interval_s)
        owner = session()
        if owner is None:
            return
        try:
            await owner.keep_alive()
        except QuireError as error:
            if _is_gone(owner, error):
                return
        del owner


def _is_gone(owner: Any, error: QuireError) -> bool:
    if error.reason not in GONE:
        return False
    log.warning("pool %s is lost: %s", owner.pool, error)
    return True
