"""Records the reason that a peer gave for the end of a call.

If a message is written while the call ends, the write fails. grpc.aio then replaces the status that is already set by
INTERNAL, "Internal error from Core" (seen with 1.85: `_write` in its `_call.py`, and `set_internal_error`). An owner
that sends one step after another would often not learn why a step was refused. So this module reads the status at the
moment when it is set.
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
    """Records the end of one call. Make this object before anything is written to the call."""

    def __init__(self, call: aio.Call) -> None:
        self._status: aio.AioRpcError | None = None
        self._ended = asyncio.Event()
        call.add_done_callback(self._note)

    async def status(self) -> aio.AioRpcError:
        """Waits for the end of the call, and returns its status as an error that is not raised, even for OK."""
        await self._ended.wait()
        assert self._status is not None, "noted before"
        return self._status

    async def error(self, timeout_s: float = SILENCE_S) -> QuireError | None:
        """Returns why the call ended. None if it succeeded, was canceled here, or has no status in time."""
        try:
            async with asyncio.timeout(timeout_s):
                status = await self.status()
        except TimeoutError:
            return None
        return None if status.code() in _WELL else from_rpc_error(status)

    def _note(self, call: Any) -> None:
        """Records the first status. gRPC calls this as soon as a status is set, before any other code can run."""
        code, details = _at_once(call.code()), _at_once(call.details())
        # gRPC may set a placeholder before the peer's status arrives.
        if self._status is None and (code, details) != _PUT_IN_ITS_PLACE:
            trailing = _at_once(call.trailing_metadata())
            self._status = aio.AioRpcError(code, aio.Metadata(), trailing, details, details)
            self._ended.set()


def _at_once(coroutine: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine that never waits, because the call's status is set, and returns its result."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        value: T = done.value
        return value
    raise AssertionError("the call has not ended, so it has no status")
