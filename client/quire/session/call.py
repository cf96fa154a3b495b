"""One Session call on the owner's side: it connects, writes and reads until the call ends.

grpc.aio raises the same error for a canceled call and for a canceled task. This module distinguishes the two cases:
canceling a call must not cancel the tasks that write to it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from typing import Any, Final

from google.protobuf.message import DecodeError
from grpc import aio

from quire._transport.channel import is_task_cancelled
from quire._transport.inherited import inheritable
from quire.errors import QuireError, UnavailableError
from quire.session.call_status import Ending
from quire.session.exchange import exchange, may_exchange
from quire.v1 import _packed_pb2 as packed

METHOD: Final = "/quire.v1.AllocatorService/Session"
LOOK_S: Final = 0.25  # seconds between two checks for cancellation of an unconnected call


class EndedError(Exception):
    """The call has ended. `said` is the error that the peer sent, if any."""

    def __init__(self, said: QuireError | None) -> None:
        super().__init__(said)
        self.said = said


class SessionStub:
    """A stub with only the Session call of `AllocatorServiceStub`. The call's messages have packed columns as bytes."""

    def __init__(self, channel: aio.Channel) -> None:
        stream_stream: Any = channel.stream_stream  # Any, because the stubs declare no default values.
        self.Session: Any = stream_stream(
            METHOD,
            request_serializer=packed.SessionRequest.SerializeToString,
            response_deserializer=packed.SessionReply.FromString,
            _registered_method=True,
        )


class SessionCall:
    """Writes and reads one stream of the Session RPC: one task at a time writes, another one reads.

    If the next message can only be the answer to a message that is still to be sent, the reader waits in `answer`. One
    operation for sending and receiving costs less than a write and a read.
    """

    def __init__(self, call: aio.StreamStreamCall[packed.SessionRequest, packed.SessionReply]) -> None:
        self._call = inheritable(call)
        self._ending = Ending(call)
        self._is_cancelled = False
        self._sending = asyncio.Lock()
        # While `answer` waits, this future is set. `send` then puts a message into the future, and `answer` sends it.
        self._asked: asyncio.Future[packed.SessionRequest | None] | None = None
        self._is_asking = False
        call.add_done_callback(lambda _call: self._read_on())

    async def connect(self) -> None:
        """Waits until the call is connected.

        Do not write earlier: if a call without a connection is canceled, gRPC never wakes a task that waits to write.

        Raises:
            EndedError: the call was canceled in the meantime.
        """
        connecting = asyncio.create_task(_connection(self._call))
        try:
            while not connecting.done() and not self._is_cancelled:
                await asyncio.wait([connecting], timeout=LOOK_S)
        finally:
            connecting.cancel()
        if self._is_cancelled:
            raise EndedError(None)

    async def read(self) -> packed.SessionReply:
        """Returns the next message.

        Raises:
            EndedError: the call has ended without another message.
        """
        try:
            reply: Any = await self._call.read()
        except asyncio.CancelledError:
            if is_task_cancelled():
                raise
            raise EndedError(await self._ending.error()) from None
        except (aio.AioRpcError, asyncio.InvalidStateError):
            raise EndedError(await self._ending.error()) from None
        if reply is aio.EOF:  # type: ignore[attr-defined]
            raise EndedError(await self._ending.error())
        if reply is None:  # gRPC returns None for bytes that cannot be parsed.
            raise EndedError(_spoiled())
        message: packed.SessionReply = reply
        return message

    @property
    def is_sending(self) -> bool:
        """Tells whether a message is being written."""
        return self._sending.locked()

    async def send(self, outbox: deque[packed.SessionRequest], *, asks: bool) -> None:
        """Sends all messages in the outbox, and removes them. If the call ends in the meantime, `read` raises the
        reason.

        With `asks`, the caller sends nothing more until a message is answered. If `answer` is waiting, a single message
        is passed to it, and further messages stay in the outbox until it returns.
        """
        if asks and len(outbox) == 1 and self._asked is not None and not self._asked.done():
            self._is_asking = True
            self._asked.set_result(outbox.popleft())
            return
        async with self._sending:
            while outbox and not (self._is_cancelled or self._is_asking) and await self._write(outbox.popleft()):
                pass

    async def answer(self) -> packed.SessionReply:
        """Waits until `send` passes a message or writes one, and returns the peer's next message.

        Raises:
            EndedError: the call has ended.
        """
        if not may_exchange(self._call) or self._call.done() or self.is_sending:
            return await self.read()
        self._asked = asyncio.get_running_loop().create_future()
        try:
            question = await self._asked
            reply = None if question is None else await exchange(self._call, question)
        except DecodeError:
            raise EndedError(_spoiled()) from None
        finally:
            self._asked, self._is_asking = None, False
        return await self.read() if reply is None else reply

    def _read_on(self) -> None:
        if self._asked is not None and not self._asked.done():
            self._asked.set_result(None)

    async def _write(self, message: packed.SessionRequest) -> bool:
        """Sends one message. Returns False if the call is over."""
        self._read_on()
        try:
            await self._call.write(message)
        except asyncio.CancelledError:
            if is_task_cancelled():
                raise
            return False
        except (aio.AioRpcError, asyncio.InvalidStateError):
            return False
        return True

    def cancel(self) -> None:
        """Ends the call. The task that reads it gets an EndedError."""
        self._is_cancelled = True
        self._call.cancel()


def _spoiled() -> UnavailableError:
    return UnavailableError("the server is not an allocator, or its messages are corrupted on the way")


async def _connection(call: Any) -> None:
    """Returns when the call is connected or has failed. A failure is not raised here: reading raises it."""
    with contextlib.suppress(aio.AioRpcError):
        await call.wait_for_connection()
