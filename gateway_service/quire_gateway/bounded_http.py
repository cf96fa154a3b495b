"""HTTP as uvicorn speaks it with httptools, and a limit on what comes before a body, which uvicorn leaves out."""

from __future__ import annotations

from typing import Final

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEAD_BYTES_MAX: Final = 65_536  # of a request line and its headers: what nginx and h11 take by default, or more


class BoundedHttp(HttpToolsProtocol):
    """Ends a connection whose request line and headers do not end.

    Its parser keeps an unfinished header for as long as more of it comes. What one read brings, at most 256 KiB, is
    looked at as a whole, so a head may be longer than the limit by so much.
    """

    _head_bytes = 0
    _is_in_head = True

    def data_received(self, data: bytes) -> None:
        """Parses, and counts what came before the end of the headers."""
        super().data_received(data)
        if not self._is_in_head or self.transport.is_closing():
            return
        self._head_bytes += len(data)
        if self._head_bytes > HEAD_BYTES_MAX:
            self.send_400_response(f"The request line and its headers have more than {HEAD_BYTES_MAX} bytes.")

    def on_message_begin(self) -> None:
        """Begins a request, whose head is counted from here."""
        super().on_message_begin()
        self._is_in_head, self._head_bytes = True, 0

    def on_headers_complete(self) -> None:
        """Ends the head, and counts no further."""
        self._is_in_head = False
        super().on_headers_complete()
