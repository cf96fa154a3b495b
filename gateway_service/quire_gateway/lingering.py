"""A connection whose last answer arrives.

A socket that is closed while something lies in it unread is reset, and the reset overtakes the answer: a caller that
sends a body too large sees a broken connection instead of 413.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

LINGER_S: Final = 10.0
LINGER_BYTES: Final = 64 << 20  # that are dropped meanwhile


class Lingering:
    """A transport that is closed in two steps where something was left unread: it says that nothing more comes, and
    drops what still arrives until its other end closes, too, or time or bytes are spent.

    Args:
        transport: the wrapped transport; all other methods are its own.
        loop: the event loop of the transport.

    Attributes:
        is_unread: whether there may be something that nobody reads.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._left_bytes = LINGER_BYTES
        self._timer: asyncio.TimerHandle | None = None
        self.is_unread = False
        self.write = transport.write  # called for each piece of an answer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def is_closing(self) -> bool:
        """Tells whether all is said."""
        return self._timer is not None or self._transport.is_closing()

    def close(self) -> None:
        """Ends the answers, and with them the connection, or soon after them."""
        if not self.is_unread or self.is_closing():
            self.end()
            return
        self._timer = self._loop.call_later(LINGER_S, self.end)
        if self._transport.can_write_eof():
            self._transport.write_eof()
        self._transport.resume_reading()

    def close_unread(self) -> None:
        """Ends the answers while something is still to come."""
        self.is_unread = True
        self.close()

    def drop(self, byte_count: int) -> None:
        """Counts what came after the last request."""
        self._left_bytes -= byte_count
        if self._left_bytes < 0:
            self.end()

    def end(self) -> None:
        """Ends the connection once all is written."""
        self._stop()
        self._transport.close()

    def abort(self) -> None:
        """Ends the connection at once."""
        self._stop()
        self._transport.abort()

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
