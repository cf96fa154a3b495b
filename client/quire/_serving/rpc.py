"""gRPC on the server's side: bearer tokens, what a certificate permits, and errors with their reason."""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable, Sequence
from functools import lru_cache
from typing import Any, NoReturn, TypeAlias

import grpc
import structlog
from grpc import aio

from quire.errors import QuireError, Reason, to_metadata
from quire.protocol.permissions import EVERYTHING, Permissions, permissions_of

Handler = Any  # grpc.RpcMethodHandler, which is generic for type checkers only
Authorize: TypeAlias = "Callable[[aio.ServicerContext[Any, Any]], Permissions]"  # what the caller of a call may do

log = structlog.get_logger()


async def abort(context: aio.ServicerContext[Any, Any], error: QuireError) -> NoReturn:
    """Ends the call with the error's code and, in the trailing metadata, its reason and when to come back."""
    await context.abort(error.code, error.message, trailing_metadata=to_metadata(error))
    raise AssertionError("abort returned")


def permit_everything(_context: aio.ServicerContext[Any, Any]) -> Permissions:
    """Permits everything where callers show no certificate: on loopback, and with a token, of which there is one for
    all."""
    return EVERYTHING


def permit_as_certified(context: aio.ServicerContext[Any, Any]) -> Permissions:
    """Returns what the certificate of the call's connection says; nothing without one."""
    return _certified(tuple(context.auth_context().get("peer_uri", ())))


@lru_cache(maxsize=1024)
def _certified(uris: tuple[bytes, ...]) -> Permissions:
    return permissions_of(uri.decode("ascii", errors="replace") for uri in uris)


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
        log.warning("call refused", method=handler_call_details.method, reason=Reason.TOKEN)
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
