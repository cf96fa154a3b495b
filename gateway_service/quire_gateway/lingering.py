"""Connections that end without losing their last answer.

If a socket is closed while it has unread bytes, the system resets the connection, and the reset overtakes the answer. A
caller that sends a body too large would see a broken connection instead of the answer 413.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

LINGER_S: Final = 10.0
LINGER_BYTES: Final = 64 << 20  # the most bytes that are read and dropped before the connection is closed


class Lingering:
    """A transport that closes in two steps if bytes may be unread.

    The transport first closes its sending half. Then it drops the bytes that still arrive, until the peer also closes,
    or a limit of time or bytes is reached.

    Args:
        transport: the wrapped transport, which gets all other calls.
        loop: the event loop of the transport.

    Attributes:
        is_unread: whether bytes may have arrived that the gateway does not read.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._left_bytes = LINGER_BYTES
        self._timer: asyncio.TimerHandle | None = None
        self.is_unread = False
        self.write = transport.write  # Stored, because `__getattr__` for each piece of an answer would cost time.

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def is_closing(self) -> bool:
        """Tells whether no more answers can be sent."""
        return self._timer is not None or self._transport.is_closing()

    def close(self) -> None:
        """Ends the sending side. Closes the connection at once, or after lingering if bytes may be unread."""
        if not self.is_unread or self.is_closing():
            self.end()
            return
        self._timer = self._loop.call_later(LINGER_S, self.end)
        if self._transport.can_write_eof():
            self._transport.write_eof()
        self._transport.resume_reading()

    def close_unread(self) -> None:
        """Ends the sending side while the caller may still be sending."""
        self.is_unread = True
        self.close()

    def drop(self, byte_count: int) -> None:
        """Counts bytes that came after the last request, and ends the connection if they are too many."""
        self._left_bytes -= byte_count
        if self._left_bytes < 0:
            self.end()

    def end(self) -> None:
        """Closes the connection once all written bytes are sent."""
        self._stop()
        self._transport.close()

    def abort(self) -> None:
        """Closes the connection at once."""
        self._stop()
        self._transport.abort()

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
