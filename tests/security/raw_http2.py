"""A gRPC caller without gRPC. The client sends calls in parts, and reads any part of their answers."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import struct
from collections.abc import AsyncIterator, Iterable
from typing import Final

from quire import Tls

DATA, HEADERS, RESET, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0x0, 0x1, 0x3, 0x4, 0x6, 0x7, 0x8
END_STREAM = ACK = 0x1
END_HEADERS = 0x4
INITIAL_WINDOW_SIZE = 0x4
WINDOW_BYTES: Final = 65_535  # HTTP/2's initial flow-control window, for streams and connections
FRAME_BYTES: Final = 16_384
IDLE_S: Final = 1.0


def framed(message: bytes, size: int | None = None) -> bytes:
    """Returns a message with gRPC's prefix, which may claim another size."""
    return b"\0" + struct.pack(">I", len(message) if size is None else size) + message


class RawCaller:
    """One connection. The caller never enlarges the receive windows that it gave the server at the start.

    Attributes:
        ended: streams that the server has ended.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, window: int) -> None:
        self._reader, self._writer = reader, writer
        self._room, self._stream_room = WINDOW_BYTES, dict[int, int]()
        self._initial_room = WINDOW_BYTES
        self._has_news = asyncio.Event()
        self._next_stream = 1
        self.ended = set[int]()
        writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
        self._write(SETTINGS, 0, 0, struct.pack(">HI", INITIAL_WINDOW_SIZE, window))

    def begin(self, method: str, metadata: Iterable[tuple[str, str]]) -> int:
        """Starts a call without sending its message. Returns the number of its stream."""
        stream, self._next_stream = self._next_stream, self._next_stream + 2
        fields = [(":method", "POST"), (":scheme", "https"), (":path", method), (":authority", "localhost")]
        fields += [("te", "trailers"), ("content-type", "application/grpc"), *metadata]
        self._write(HEADERS, END_HEADERS, stream, b"".join(_literal(name) + _text(value) for name, value in fields))
        self._stream_room[stream] = self._initial_room
        return stream

    async def send(self, parts: dict[int, bytes], *, are_last: bool = False) -> None:
        """Sends data on streams as the server's windows allow. Returns when the server has sent nothing for `IDLE_S`
        seconds."""
        while True:
            self._has_news.clear()
            for stream in list(parts):
                if not self._room:
                    break
                parts[stream] = self._send_some(stream, parts[stream], are_last)
                if not parts[stream]:
                    del parts[stream]
            await self._writer.drain()
            try:
                async with asyncio.timeout(IDLE_S):
                    await self._has_news.wait()
            except TimeoutError:
                return

    def _send_some(self, stream: int, data: bytes, is_last: bool) -> bytes:
        """Sends as much as the windows allow. Returns the rest, or nothing if the stream has ended."""
        if stream in self.ended:
            return b""
        room = max(0, min(self._room, self._stream_room[stream]))
        rest = data[room:]
        for start in range(0, min(room, len(data)), FRAME_BYTES):
            part = data[start : min(room, start + FRAME_BYTES)]
            flags = END_STREAM if is_last and start + len(part) == len(data) else 0
            self._write(DATA, flags, stream, part)
        self._room -= len(data) - len(rest)
        self._stream_room[stream] -= len(data) - len(rest)
        return rest

    async def read(self) -> None:
        """Reads frames until the connection ends. Answers pings and settings."""
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await self._reader.readexactly(9)
                kind, flags, stream = head[3], head[4], int.from_bytes(head[5:9]) & 0x7FFFFFFF
                payload = await self._reader.readexactly(int.from_bytes(head[:3]))
                if kind == WINDOW_UPDATE:
                    self._widen(stream, int.from_bytes(payload))
                elif kind == SETTINGS and not flags & ACK:
                    for number, value in struct.iter_unpack(">HI", payload):
                        if number == INITIAL_WINDOW_SIZE:
                            self._initial_room, more = value, value - self._initial_room
                            self._stream_room = {each: room + more for each, room in self._stream_room.items()}
                    self._write(SETTINGS, ACK, 0, b"")
                elif kind == PING and not flags & ACK:
                    self._write(PING, ACK, 0, payload)
                elif kind == RESET or (kind in (DATA, HEADERS) and flags & END_STREAM):
                    self.ended.add(stream)
                elif kind == GOAWAY:
                    return
                self._has_news.set()

    def _widen(self, stream: int, count: int) -> None:
        if stream == 0:
            self._room += count
        elif stream in self._stream_room:
            self._stream_room[stream] += count

    def _write(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        self._writer.write(struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream))
        self._writer.write(payload)


@contextlib.asynccontextmanager
async def raw_caller(address: str, tls: Tls | None = None, *, window: int = WINDOW_BYTES) -> AsyncIterator[RawCaller]:
    """Connects to a server. The server may send `window` bytes of each call's answer."""
    host, _, port = address.rpartition(":")
    context = None
    if tls is not None:
        context = ssl.create_default_context(cafile=str(tls.ca))
        context.load_cert_chain(str(tls.cert), str(tls.key))
        context.set_alpn_protocols(["h2"])
    reader, writer = await asyncio.open_connection(host, int(port), ssl=context)
    caller = RawCaller(reader, writer, window)
    reading = asyncio.create_task(caller.read())
    try:
        yield caller
    finally:
        reading.cancel()
        writer.transport.abort()


def _literal(name: str) -> bytes:
    """Returns the start of a header field that is not indexed (RFC 7541, 6.2.2)."""
    return b"\0" + _text(name)


def _text(text: str) -> bytes:
    """Returns a string without Huffman coding (RFC 7541, 5.2)."""
    data, length = text.encode(), len(text.encode())
    if length < 127:
        return bytes([length]) + data
    prefix, length = bytearray([127]), length - 127
    while length >= 128:
        prefix.append(length % 128 + 128)
        length //= 128
    return bytes([*prefix, length]) + data
