"""Servers accept pings on idle connections. Routers send them to notice dead connections."""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.client.servers import allocator_process

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS, PING, GOAWAY, ACK = 4, 6, 7, 1
# Seconds between pings; Quire's servers permit 2. With gRPC's default, 5 minutes, a server hangs up at the third ping.
APART_S = 2.5
PING_COUNT = 5


class Frame(NamedTuple):
    """An HTTP/2 frame that belongs to no stream."""

    kind: int
    flags: int
    payload: bytes = b""

    def sent(self) -> bytes:
        return len(self.payload).to_bytes(3, "big") + bytes([self.kind, self.flags]) + bytes(4) + self.payload


def frames(connection: socket.socket) -> Iterator[Frame]:
    """Yields the frames that a server sends, until it closes the connection."""
    with connection.makefile("rb") as stream:
        while head := stream.read(9):
            yield Frame(head[3], head[4], stream.read(int.from_bytes(head[:3], "big")))


def test_an_idle_caller_that_pings_every_few_seconds_keeps_its_connection(tmp_path: Path) -> None:
    with allocator_process(tmp_path) as process:
        host, _, port = process.address.rpartition(":")
        with socket.create_connection((host, int(port)), timeout=60) as connection:
            connection.sendall(PREFACE + Frame(SETTINGS, 0).sent())
            received = frames(connection)
            for number in range(PING_COUNT):
                connection.sendall(Frame(PING, 0, number.to_bytes(8, "big")).sent())
                assert is_answered(connection, received, number)
                until = time.monotonic() + APART_S  # At this time the server permits another ping.
                while (left := until - time.monotonic()) > 0:
                    if select.select([connection], [], [], left)[0]:
                        take(connection, next(received))


def is_answered(connection: socket.socket, received: Iterator[Frame], number: int) -> bool:
    return any(
        (frame.kind, frame.flags, frame.payload) == (PING, ACK, number.to_bytes(8, "big"))
        for frame in received
        if take(connection, frame)
    )


def take(connection: socket.socket, frame: Frame) -> bool:
    """Answers a frame if HTTP/2 demands it; fails the test if the server ends the connection."""
    assert frame.kind != GOAWAY, frame.payload
    if frame.kind in (SETTINGS, PING) and not frame.flags & ACK:
        answer = frame.payload if frame.kind == PING else b""
        connection.sendall(Frame(frame.kind, ACK, answer).sent())
    return True
