"""Responses that are computed in the background, while their callers do not wait."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Final

from quire_gateway.failures import RATE, ApiError
from quire_gateway.shares import Shares

COUNT_MAX: Final = 256  # the most background responses that run at a time


class Background:
    """Runs background responses. Like the store of their results, background responses end with the process.

    Args:
        are_several: whether there are several namespaces. Each may use at most half of what other namespaces leave.
    """

    def __init__(self, *, are_several: bool) -> None:
        self._places = Shares(COUNT_MAX, is_for_several=are_several)
        self._running: dict[tuple[str, str], asyncio.Task[None]] = {}

    def start(self, namespace: str, identity: str, work: Coroutine[None, None, None]) -> None:
        """Starts a response.

        Raises:
            ApiError: too many responses are running.
        """
        if not self._places.take(namespace, 1):
            work.close()
            what = f"too many responses run in the background (at most {COUNT_MAX} at this gateway)"
            raise ApiError(429, f"{what}: try again", kind=RATE, code="queue_full")
        task = self._running[namespace, identity] = asyncio.create_task(work)
        task.add_done_callback(lambda _: self._ended(namespace, identity))

    async def cancel(self, namespace: str, identity: str) -> bool:
        """Cancels a response. Returns whether it was running."""
        task = self._running.get((namespace, identity))
        if task is None:
            return False
        task.cancel()
        await asyncio.wait((task,))
        return task.cancelled()

    def _ended(self, namespace: str, identity: str) -> None:
        del self._running[namespace, identity]
        self._places.give_back(namespace, 1)
