"""One Session call as its owner sees it: connected, written to and read from until it ends.

grpc.aio raises the same for a call that was cancelled as for a task that was: the two are told apart. Whoever cancels a
call means the call, not those who happen to write to it.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any, Final

from grpc import aio

from quire._transport.channel import is_task_cancelled
from quire.errors import QuireError, UnavailableError
from quire.session.call_status import Ending
from quire.v1 import allocator_pb2 as pb

LOOK_S: Final = 0.25  # seconds between two looks at whether an unconnected call was cancelled


class EndedError(Exception):
    """The call is over; `said` is why, if the other side said so."""

    def __init__(self, said: QuireError | None) -> None:
        super().__init__(said)
        self.said = said


class SessionCall:
    """Writes and reads one stream of the Session RPC: one task at a time writes, another one reads."""

    def __init__(self, call: aio.StreamStreamCall[pb.SessionRequest, pb.SessionReply]) -> None:
        self._call = call
        self._ending = Ending(call)
        self._is_cancelled = False

    async def connect(self) -> None:
        """Waits until there is a connection.

        Nothing may be written before: gRPC never wakes who waits to write on a call that is cancelled while it has no
        connection.

        Raises:
            EndedError: the call was cancelled meanwhile.
        """
        connecting = asyncio.create_task(_connection(self._call))
        try:
            while not connecting.done() and not self._is_cancelled:
                await asyncio.wait([connecting], timeout=LOOK_S)
        finally:
            connecting.cancel()
        if self._is_cancelled:
            raise EndedError(None)

    async def read(self) -> pb.SessionReply:
        """Returns the next message.

        Raises:
            EndedError: there is none.
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
        if reply is None:  # grpc's word for bytes that are no message
            raise EndedError(UnavailableError("what answers is no allocator, or its messages arrive spoiled"))
        message: pb.SessionReply = reply
        return message

    async def write(self, message: pb.SessionRequest) -> bool:
        """Sends one message. Returns False if the call is over; `read` says why."""
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
        """Ends the call; who reads it notices."""
        self._is_cancelled = True
        self._call.cancel()


async def _connection(call: Any) -> None:
    """Returns when there is a connection, or the call has failed, which who reads it is told, too."""
    with contextlib.suppress(aio.AioRpcError):
        await call.wait_for_connection()
