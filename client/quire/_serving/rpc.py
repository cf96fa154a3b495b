"""gRPC on the server's side: bearer tokens, and errors with their reason."""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NoReturn

import grpc
from grpc import aio

from quire.errors import DETAILS_KEY, QuireError, Reason, to_details

Handler = Any  # grpc.RpcMethodHandler, which is generic for type checkers only


async def abort(context: aio.ServicerContext[Any, Any], error: QuireError) -> NoReturn:
    """Ends the call with the error's code and, in the trailing metadata, its reason."""
    await context.abort(error.code, error.message, trailing_metadata=((DETAILS_KEY, to_details(error)),))
    raise AssertionError("abort returned")


class TokenInterceptor(aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in its stubs only
    """Refuses every call whose `authorization` is not `Bearer TOKEN`: UNAUTHENTICATED / TOKEN."""

    def __init__(self, token: str) -> None:
        self._expected = f"Bearer {token}".encode()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        """Passes the call on, or puts a handler that refuses it in the real one's place."""
        handler = await continuation(handler_call_details)
        if handler is None or self._is_authorized(handler_call_details.invocation_metadata):
            return handler
        return _refusing(handler)

    def _is_authorized(self, metadata: Sequence[tuple[str, str | bytes]] | None) -> bool:
        given = [value for key, value in metadata or () if key == "authorization"]
        if len(given) != 1:
            return False
        value = given[0].encode() if isinstance(given[0], str) else given[0]
        return hmac.compare_digest(value, self._expected)


def _refusing(handler: Handler) -> Handler:
    async def refuse(_request: object, context: aio.ServicerContext[Any, Any]) -> None:
        await abort(context, QuireError.of(Reason.TOKEN, "this server asks for a bearer token"))

    if handler.request_streaming and handler.response_streaming:
        return grpc.stream_stream_rpc_method_handler(refuse)
    if handler.response_streaming:
        return grpc.unary_stream_rpc_method_handler(refuse)
    if handler.request_streaming:
        return grpc.stream_unary_rpc_method_handler(refuse)
    return grpc.unary_unary_rpc_method_handler(refuse)
