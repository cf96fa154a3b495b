"""Limits that both sides of the protocol share. A server sends its own limits with `Ready`, or in errors."""

from __future__ import annotations

from typing import Final

PROTOCOL_VERSION: Final = 3
MESSAGE_BYTES_MAX: Final = 2 << 20  # most bytes of a request or an answer
NAMESPACE_BYTES_MAX: Final = 128
REPORT_CHUNK_BYTES_MAX: Final = 256 << 10
REPORT_CHUNK_ENTRIES_MAX: Final = 4096  # most sequences, published blocks and freed blocks of a chunk, together
STOPS_MAX: Final = 36  # most stops of a sequence
BREAKPOINTS_MAX: Final = 4  # most breakpoints of a new sequence: token counts where its owner asks for stops
REQUEST_ID_CHARACTERS_MAX: Final = 64
PRIORITY_MAX: Final = 10  # The lowest priority is -10. Requests with a larger priority run sooner (docs/scheduling.md).
KEEP_MS_MAX: Final = 86_400_000  # A cached prefix is kept for at most a day.
# An owner's defaults, until the allocator sends its own values (`Limits`).
HEARTBEAT_S: Final = 1.0  # interval of heartbeats, in both directions
SILENCE_S: Final = 3.0  # An owner replaces a stream that is silent for this long.
WATCH_BEAT_S: Final = 5.0  # interval of messages to a watcher while nothing happens
