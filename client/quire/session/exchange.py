"""Sends a message and receives the next one as one operation of gRPC's core. grpc.aio uses two operations.

The thread that completes calls reports each finished operation to the event loop: two wake-ups, some system calls, two
rounds of the loop. A caller that waits for the answer does not need to know that its message was sent. One operation
for both takes a quarter less CPU per bare round trip (docs/decisions/0057-a-step-and-its-answer-are-one-operation.md).

grpc.aio has no public way to send and receive in one operation. This module uses the internal `execute_batch` and two
kinds of operations. Sessions on untested gRPC releases use the public methods.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

from quire._transport.grpc_io import is_at_most
from quire.v1 import _packed_pb2 as packed

LAST_KNOWN: Final = (1, 85)  # newest gRPC release that was tested
_NO_FLAGS: Final = 0


try:
    from grpc._cython import cygrpc  # type: ignore[attr-defined]
except ImportError:
    IS_OFFERED = False
else:
    IS_OFFERED = is_at_most(LAST_KNOWN) and hasattr(cygrpc, "execute_batch")


def may_exchange(call: Any) -> bool:
    """Tells whether `exchange` can be used on a call. A call with interceptors does not allow `exchange`."""
    return IS_OFFERED and hasattr(call, "_cython_call")


async def exchange(call: Any, request: packed.SessionRequest) -> packed.SessionReply | None:
    """Sends a message on a call, and returns the next message that arrives. No other task may write or read during the
    exchange.

    None means that the call has ended. Reading the call then raises the reason.

    Raises:
        DecodeError: the bytes do not parse.
    """
    receiving = cygrpc.ReceiveMessageOperation(_NO_FLAGS)
    sending = cygrpc.SendMessageOperation(request.SerializeToString(), _NO_FLAGS)
    try:
        await cygrpc.execute_batch(call._cython_call, (sending, receiving), asyncio.get_running_loop())
    except cygrpc.ExecuteBatchError:
        return None
    data = receiving.message()
    return None if data is None else packed.SessionReply.FromString(data)
