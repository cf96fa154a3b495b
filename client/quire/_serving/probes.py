"""Answers HTTP probes on the port of /metrics: whether a server is alive, and whether it is ready.

    /healthz    200 if the event loop answers, else 503: the process must be restarted
    /readyz     200 if the server should get work, else 503

Probes need no token, and reveal nothing else.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Final

ALIVE_WITHIN_S: Final = 5.0  # An event loop that is busy for longer counts as dead.


class Probes:
    """Answers probes from the threads of the metrics server.

    Args:
        loop: the server's event loop.
        is_ready: returns whether the server is ready. The metrics server's threads call this method.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, is_ready: Callable[[], bool]) -> None:
        self._loop = loop
        self._is_ready = is_ready

    def answer(self, path: str) -> bool | None:
        """Returns a probe's answer, or None if the path is not a probe."""
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
        except RuntimeError:  # The event loop is closed.
            return False
        return turned.wait(ALIVE_WITHIN_S)
