"""A proxy that speaks HTTP/2, as Envoy or nginx do: it answers pings by itself, whoever lives behind it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import grpc
from grpc import aio


class Http2Proxy(grpc.GenericRpcHandler):
    """Forwards every call, as bytes, to a gRPC server; made inside the event loop, which has to run for it."""

    def __init__(self, target: str) -> None:
        self.target = target
        self._is_open = asyncio.Event()
        self._is_open.set()
        self._server = aio.server(options=[("grpc.http2.max_ping_strikes", 0)])  # no limit on pings
        self._server.add_generic_rpc_handlers((self,))
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"

    async def start(self) -> None:
        """Connects nothing yet."""
        self._channel = aio.insecure_channel(self.target)
        await self._server.start()

    def strand(self) -> None:
        """Nothing gets through any more, either way, and nobody is told."""
        self._is_open.clear()

    def let_through(self) -> None:
        """Ends that; what was held back is late, not lost."""
        self._is_open.set()

    async def stop(self) -> None:
        """Ends everything."""
        self.let_through()
        await self._server.stop(0)
        await self._channel.close(0)

    def service(self, handler_call_details: Any) -> Any:
        """Takes every method; of one message each way is a stream, too."""
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
