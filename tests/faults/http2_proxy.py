"""A proxy that speaks HTTP/2, as Envoy and nginx do: it answers pings itself, even if the server behind it is gone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import grpc
from grpc import aio


class Http2Proxy(grpc.GenericRpcHandler):
    """Forwards every call, as bytes, to a gRPC server. Create it inside the running event loop."""

    def __init__(self, target: str) -> None:
        self.target = target
        self._is_open = asyncio.Event()
        self._is_open.set()
        self._server = aio.server(options=[("grpc.http2.max_ping_strikes", 0)])  # no limit on pings
        self._server.add_generic_rpc_handlers((self,))
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"

    async def start(self) -> None:
        """Starts to listen. gRPC connects to the target at the first call."""
        self._channel = aio.insecure_channel(self.target)
        await self._server.start()

    def strand(self) -> None:
        """Holds back all data in both directions, without closing a connection."""
        self._is_open.clear()

    def let_through(self) -> None:
        """Forwards data again. Data that was held back arrives late; none is lost."""
        self._is_open.set()

    async def stop(self) -> None:
        """Closes all connections and stops."""
        self.let_through()
        await self._server.stop(0)
        await self._channel.close(0)

    def service(self, handler_call_details: Any) -> Any:
        """Handles every method as a stream in both directions, also methods with one message each way."""
        return grpc.stream_stream_rpc_method_handler(partial(self._forward, handler_call_details.method))

    async def _forward(self, method: str, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        call = self._channel.stream_stream(method)(metadata=context.invocation_metadata())

        async def send() -> None:
            async for request in requests:
                await self._is_open.wait()
                await call.write(request)
            await call.done_writing()

        sending = asyncio.create_task(send())
        try:
            async for reply in call:
                await self._is_open.wait()
                yield reply
        except aio.AioRpcError as error:
            await self._is_open.wait()
            context.set_trailing_metadata(tuple(error.trailing_metadata() or ()))
            await context.abort(error.code(), error.details() or "")
        finally:
            sending.cancel()
            call.cancel()
