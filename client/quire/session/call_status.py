"""The reason that a call ended, as the peer said it.

A message that is written while the call ends fails, and grpc.aio puts INTERNAL, "Internal error from Core", in the
place of the status that is there already (seen with 1.85: `_write` in its `_call.py`, and `set_internal_error`). An
owner that sends one step after the other would often not learn why one of them was refused. So the status is looked at
in the moment in which it is set.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, Final, TypeVar

import grpc
from grpc import aio

from quire.errors import QuireError, from_rpc_error
from quire.protocol.limits import SILENCE_S

_PUT_IN_ITS_PLACE: Final = (grpc.StatusCode.INTERNAL, "Internal error from Core")
_WELL: Final = (grpc.StatusCode.OK, grpc.StatusCode.CANCELLED)

T = TypeVar("T")


class Ending:
    """Notes how one call ended. It must be made before anything is written to the call."""

    def __init__(self, call: aio.Call) -> None:
        self._status: aio.AioRpcError | None = None
        self._ended = asyncio.Event()
        call.add_done_callback(self._note)

    async def status(self) -> aio.AioRpcError:
        """Waits for the end of the call, and returns how it ended; an OK, too, comes as an error that is not raised."""
        await self._ended.wait()
        assert self._status is not None, "noted before"
        return self._status

    async def error(self, timeout_s: float = SILENCE_S) -> QuireError | None:
        """Says why the call ended; None if it ended well, was cancelled here, or does not say in time."""
        try:
            async with asyncio.timeout(timeout_s):
                status = await self.status()
        except TimeoutError:
            return None
        return None if status.code() in _WELL else from_rpc_error(status)

    def _note(self, call: Any) -> None:
        """Notes the first status that is set; gRPC calls this before anything else can happen."""
        code, details = _at_once(call.code()), _at_once(call.details())
        # gRPC may set a placeholder first. The peer's status comes later.
        if self._status is None and (code, details) != _PUT_IN_ITS_PLACE:
            trailing = _at_once(call.trailing_metadata())
            self._status = aio.AioRpcError(code, aio.Metadata(), trailing, details, details)
            self._ended.set()


def _at_once(coroutine: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine that need not wait, since its status is set, and returns its result."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        value: T = done.value
        return value
    raise AssertionError("called before the call had a status")
