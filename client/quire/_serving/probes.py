"""Answers to probes over HTTP, beside /metrics: whether a server is alive, and whether it is ready.

    /healthz    200 if the event loop answers, else 503: only a new process helps
    /readyz     200 if work is better sent here than elsewhere, else 503

Probes show no token, and get no other answer.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Final

ALIVE_WITHIN_S: Final = 5.0  # An event loop that is busy for longer counts as dead.


class Probes:
    """Answers from a thread of its own.

    Args:
        loop: of the server.
        is_ready: read from that thread.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, is_ready: Callable[[], bool]) -> None:
        self._loop = loop
        self._is_ready = is_ready

    def answer(self, path: str) -> bool | None:
        """Returns whether the answer is yes; None where the path asks nothing of this kind."""
        match path:
            case "/healthz":
                return self._is_alive()
            case "/readyz":
                return self._is_ready()
        return None

    def _is_alive(self) -> bool:
        turned = threading.Event()
        try:
            self._loop.call_soon_threadsafe(turned.set)
        except RuntimeError:  # the loop is closed
            return False
        return turned.wait(ALIVE_WITHIN_S)
