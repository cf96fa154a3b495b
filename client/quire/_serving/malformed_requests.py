"""Requests whose bytes are no message: refused like any other malformed one, with a code and a reason."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from grpc import aio

from quire._serving.rpc import Handler, abort
from quire.errors import QuireError, Reason


class ReadingInterceptor(aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in its stubs only
    """Refuses a request whose bytes are no message: INVALID_ARGUMENT / MALFORMED, where gRPC would say UNKNOWN.

    Streams of requests are left to their handlers, which read them one by one.
    """

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        """Puts a handler around the real one."""
        handler = await continuation(handler_call_details)
        if handler is None or handler.request_streaming or handler.request_deserializer is None:
            return handler
        if handler.response_streaming:
            behave, make = _streaming(handler.unary_stream), grpc.unary_stream_rpc_method_handler
        else:
            behave, make = _answering(handler.unary_unary), grpc.unary_unary_rpc_method_handler
        return make(behave, _reading(handler.request_deserializer), handler.response_serializer)


def _reading(deserialize: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    def read(data: bytes) -> Any:
        try:
            return deserialize(data)
        except DecodeError:
            return None

    return read


async def _require_message(request: object, context: aio.ServicerContext[Any, Any]) -> None:
    if request is None:
        await abort(context, QuireError.of(Reason.MALFORMED, "the request's bytes are no message of its type"))


def _answering(inner: Handler) -> Handler:
    async def answer(request: Any, context: aio.ServicerContext[Any, Any]) -> Any:
        await _require_message(request, context)
        made = inner(request, context)
        return await made if inspect.isawaitable(made) else made

    return answer


def _streaming(inner: Handler) -> Handler:
    """A stream is either yielded or, by a coroutine, written to the context; the outer handler must be of its kind."""

    async def generate(request: Any, context: aio.ServicerContext[Any, Any]) -> AsyncIterator[Any]:
        await _require_message(request, context)
        async with contextlib.aclosing(inner(request, context)) as messages:
            async for message in messages:
                yield message

    async def write(request: Any, context: aio.ServicerContext[Any, Any]) -> None:
        await _require_message(request, context)
        await inner(request, context)

    return generate if inspect.isasyncgenfunction(inner) else write
