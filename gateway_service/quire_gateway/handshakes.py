"""Limits the TLS handshakes under way: at the limit, a new connection ends the oldest one.

An unfinished handshake takes about 50 KB, and anybody can begin one. The servers of asyncio and uvloop have a deadline
for handshakes, but no limit, and only they know these connections.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Callable
from typing import Final

HANDSHAKE_S: Final = 10.0
HANDSHAKES_MAX: Final = 1_024
_AGAIN_S: Final = 1.0  # seconds until the next attempt to accept a connection, after an attempt has failed


class TlsListener:
    """Accepts TLS connections.

    Lifecycle: the constructor accepts on `listener` until `close`.

    Args:
        listener: a listening socket. It belongs to the caller.
        make: makes the protocol of a connection, which gets the connection once the handshake is finished.
        context: the server's certificate and rules.
        handshakes_max: the number of handshakes that may be under way.
    """

    def __init__(
        self,
        listener: socket.socket,
        make: Callable[[], asyncio.Protocol],
        context: ssl.SSLContext,
        handshakes_max: int = HANDSHAKES_MAX,
    ) -> None:
        self._listener = listener
        self._make = make
        self._context = context
        self._handshakes_max = handshakes_max
        self._under_way: dict[asyncio.Task[None], socket.socket] = {}  # unfinished handshakes, oldest first
        listener.setblocking(False)
        self._accepting = asyncio.create_task(self._accept())

    def close(self) -> None:
        """Accepts no more connections, and ends those whose handshakes are not finished."""
        self._accepting.cancel()
        for connection in self._under_way.values():
            _end(connection)

    async def wait_closed(self) -> None:
        """Returns once nothing is accepted and no handshake is under way."""
        await asyncio.gather(self._accepting, *self._under_way, return_exceptions=True)

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(self._listener)
            except OSError:  # The caller has left again, or the process has no file descriptors left.
                await asyncio.sleep(_AGAIN_S)
                continue
            if len(self._under_way) >= self._handshakes_max:
                oldest = next(iter(self._under_way))
                _end(self._under_way.pop(oldest))
            shaking = asyncio.create_task(self._shake(connection))
            self._under_way[shaking] = connection
            shaking.add_done_callback(lambda done: self._under_way.pop(done, None))

    async def _shake(self, connection: socket.socket) -> None:
        """Completes a handshake. Callers without TLS, slow ones and those that leave are not worth a log line."""
        with contextlib.suppress(OSError):  # OSError includes ssl.SSLError and TimeoutError.
            await asyncio.get_running_loop().connect_accepted_socket(
                self._make, connection, ssl=self._context, ssl_handshake_timeout=HANDSHAKE_S
            )


def _end(connection: socket.socket) -> None:
    """Ends a connection. The handshake then fails, and closes the socket."""
    with contextlib.suppress(OSError):  # The connection may have ended just now.
        connection.shutdown(socket.SHUT_RDWR)
