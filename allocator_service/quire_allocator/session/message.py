"""One message of a stream: from its bytes to the bytes of its answers.

Compiled, because an allocator does this for every step.
"""

from __future__ import annotations

import gc
import time
from typing import TYPE_CHECKING

from google.protobuf.message import DecodeError
from quire.v1 import _packed_pb2 as packed

from quire_allocator.core.refusal import Refusal
from quire_allocator.session.machine import Phase, SessionMachine

if TYPE_CHECKING:
    from quire_allocator.metrics.counters import Counters


class Exchange:
    """Lets a stream's machine answer a message, and keeps the answers until they are sent. Does not keep the message,
    because many streams may wait for their owners at once; a session may keep the step in the message.

    Attributes:
        answers: the bytes of each answer.

    Raises:
        Refusal: the stream is over.
    """

    __slots__ = ("_applied", "_now", "_numbers", "_pool", "_reply", "_seconds", "answers")

    def __init__(self, machine: SessionMachine, counters: Counters, message: bytes, now: float) -> None:
        try:
            request = packed.SessionRequest.FromString(message)
        except DecodeError:
            raise Refusal("MALFORMED", "the message is not a SessionRequest") from None
        started = time.perf_counter()
        if machine.phase is Phase.REPORTING and request.HasField("report_end"):
            # `receive` makes the whole pool. All its objects stay, and scanning them for garbage would double the time.
            gc.disable()
            try:
                replies = machine.receive(request, now)
            finally:
                gc.enable()
        else:
            replies = machine.receive(request, now)
        self._seconds, self._now = time.perf_counter() - started, now
        self.answers = [reply.SerializeToString() for reply in replies]
        self._applied, owner = machine.applied, machine.owner
        if self._applied is not None and owner is not None:
            machine.applied = None
            self._reply = replies[0].step_reply
            # Noted for `observe`, because the pool may be dropped before that call.
            self._numbers, self._pool = counters.of(owner.name), owner.pool
            machine.count_kept(owner, len(message) + len(self.answers[0]))

    def observe(self) -> None:
        """Counts the step that the message applied, if it did: after the answer is sent, because the owner waits."""
        if self._applied is not None:
            self._numbers.observe_step(self._pool, self._applied, self._reply, self._seconds)
            self._numbers.observe_blocks(self._pool, self._applied, self._reply, self._now)
