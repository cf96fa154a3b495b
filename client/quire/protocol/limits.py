"""Limits that both sides of the protocol agree on. A server's own limits come with its `Ready` or its errors."""

from __future__ import annotations

from typing import Final

PROTOCOL_VERSION: Final = 3
MESSAGE_BYTES_MAX: Final = 2 << 20  # either way
NAMESPACE_BYTES_MAX: Final = 128
REPORT_CHUNK_BYTES_MAX: Final = 256 << 10
REPORT_CHUNK_ENTRIES_MAX: Final = 4096  # sequences, published and freed blocks together
STOPS_MAX: Final = 32  # of one sequence
REQUEST_ID_CHARACTERS_MAX: Final = 64
PRIORITY_MAX: Final = 10  # and least -10; larger is sooner (docs/scheduling.md)
# An owner's, until an allocator has told its own (`Limits`).
HEARTBEAT_S: Final = 1.0  # both ways
SILENCE_S: Final = 3.0  # then an owner leaves its stream
WATCH_BEAT_S: Final = 5.0  # between messages to a watcher while nothing happens
