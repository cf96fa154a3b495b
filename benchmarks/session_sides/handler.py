"""The allocator's handling of a stream's messages without the stream, in the measuring process."""

from __future__ import annotations

import time
from collections.abc import Sequence

from quire.v1 import _packed_pb2 as packed
from quire_allocator.core.ownership.directory import Directory
from quire_allocator.session.machine import SessionMachine
from quire_allocator.session.registry import SessionRegistry


class _Nobody:
    """Ignores all events of the session machine."""

    def ignore(self, *_: object) -> None:
        """Takes any message and does nothing."""

    opened = recovered = disagreed = resumed = dropped = expired = published = quarantined = ignore


class Handler:
    """The allocator's state machine for one owner. An `Owner` may use it in place of a stream."""

    def __init__(self) -> None:
        directory = Directory(lease_s=3600.0, pools_max=1)
        sessions = SessionRegistry(directory, _Nobody(), new_session_id=lambda: bytes(range(16)))
        self._machine = SessionMachine(sessions)

    async def ask(self, request: bytes) -> bytes:
        """Handles one message as bytes; returns the last of its answers."""
        return self.receive(packed.SessionRequest.FromString(request)).SerializeToString()

    def receive(self, request: packed.SessionRequest) -> packed.SessionReply:
        """Handles one parsed message; returns its only answer."""
        (reply,) = self._machine.receive(request, 0.0)
        return reply

    def cost_us(self, messages: Sequence[bytes]) -> float:
        """Returns the CPU microseconds per message, without parsing messages and serializing replies."""
        requests = [packed.SessionRequest.FromString(message) for message in messages]
        started = time.thread_time_ns()
        for request in requests:
            self._machine.receive(request, 0.0)
        return (time.thread_time_ns() - started) / 1_000 / len(requests)
