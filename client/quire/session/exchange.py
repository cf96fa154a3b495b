"""A message sent and the next one received as one operation of gRPC's core, where grpc.aio makes two of it.

Each operation that ends goes from the thread that completes calls to the event loop: two wake-ups, some system calls,
two rounds of the loop. That a message is out is of no interest to who waits for its answer anyway; asked for together
they take a fifth less CPU of a round trip (docs/decisions/0057-a-step-and-its-answer-are-one-operation.md).

grpc.aio does not offer it. What is used here, `execute_batch` and two kinds of operations, is its own way to the core,
and not public: releases of gRPC that nobody has looked at yet go the public way.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

from quire._transport.grpc_io import is_at_most
from quire.v1 import _packed_pb2 as packed

LAST_KNOWN: Final = (1, 85)  # newest tested gRPC release
_NO_FLAGS: Final = 0


try:
    from grpc._cython import cygrpc  # type: ignore[attr-defined]
except ImportError:
    IS_OFFERED = False
else:
    IS_OFFERED = is_at_most(LAST_KNOWN) and hasattr(cygrpc, "execute_batch")


def may_exchange(call: Any) -> bool:
    """Tells whether `exchange` can be used on a call; on one with interceptors it cannot."""
    return IS_OFFERED and hasattr(call, "_cython_call")


async def exchange(call: Any, request: packed.SessionRequest) -> packed.SessionReply | None:
    """Sends a message on a call, and returns the next one that arrives. Nobody else may write or read meanwhile. None
    means that the call has ended; reading it tells more.

    Raises:
        DecodeError: the bytes are no message.
    """
    receiving = cygrpc.ReceiveMessageOperation(_NO_FLAGS)
    sending = cygrpc.SendMessageOperation(request.SerializeToString(), _NO_FLAGS)
    try:
        await cygrpc.execute_batch(call._cython_call, (sending, receiving), asyncio.get_running_loop())
    except cygrpc.ExecuteBatchError:
        return None
    data = receiving.message()
    return None if data is None else packed.SessionReply.FromString(data)
