"""Checks each call before its handler runs: its token, a free place, and the arrival of its message. A call that the
server has not ended takes a place, and the number of places is limited.

Lifecycle of a call:

    1. refused    its token is missing or wrong. The answer does not wait for the call's message
    2. unread     the call has a place, and the server waits up to `MESSAGE_S` seconds for its message. If places run
                  out, the caller with the most unread calls loses the call that has waited longest
    3. served     the message has arrived, and the call's handler runs
    4. ended      the answer has left or the caller has gone. The call's place is free

gRPC reads the message of a unary call before any check. Otherwise callers without a token could fill a server with
calls that never send their messages. So handlers of unary requests are registered as stream handlers that read one
message. Health checks and health watches have separate places.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import weakref
from collections.abc import Awaitable, Callable, Hashable, Sequence
from typing import Any, Final, TypeAlias

import grpc
from google.protobuf.message import DecodeError
from grpc import aio

from quire import _trace_context as trace_context
from quire._serving.bearer import is_bearer_of
from quire._serving.caller_shares import CallerShares
from quire._serving.rpc import Context, Handler, abort, caller_of, log_refused
from quire._serving.tracing import OFF, Tracing
from quire._trace_context import Metadata
from quire.errors import QuireError, Reason

MESSAGE_S: Final = 10.0  # time for a unary call's message to arrive after its headers
MESSAGES_AT_ONCE_MAX: Final = 16  # concurrent reads per caller. Further messages wait unread and take no memory.
MESSAGES_BYTES_MAX: Final = 64 << 20  # requests and answers of one caller. All callers together may hold twice as many.
SMALL_BYTES: Final = 8 << 10  # Requests and answers up to this size are not counted.
ANSWER_COPIES: Final = 2  # An answer counts twice, because gRPC copies it.
HEALTH_CALLS_MAX: Final = 256
HEALTH_WATCHES_MAX: Final = 256
_HEALTH: Final = "/grpc.health.v1.Health/"
Behavior: TypeAlias = "Callable[[Any, Context], Awaitable[Any]]"  # a function that answers a call, given its messages


class CallInterceptor(aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in its stubs only
    """Checks calls, and passes them to their handlers.

    - Wrong or missing `authorization: Bearer TOKEN`: the call fails with UNAUTHENTICATED / TOKEN.
    - No free place: RESOURCE_EXHAUSTED / LIMIT.
    - No message in time: DEADLINE_EXCEEDED / IDLE.
    - Requests and unread answers of the caller hold too many bytes: RESOURCE_EXHAUSTED / LIMIT.
    - Bytes that do not parse: INVALID_ARGUMENT / MALFORMED.

    The last three checks do not apply to streams of requests: their handlers read the messages one by one.

    Args:
        token: bearer token that callers must show; None admits every caller.
        calls_max: concurrent calls, not counting health. One caller may hold at most as many places as stay free.
        tracing: records a span of each unary call that belongs to a trace.
    """

    def __init__(self, token: str | None, calls_max: int, tracing: Tracing = OFF) -> None:
        self._token, self._tracing = token, tracing
        self._calls, self._health = _Calls(calls_max), _Calls(HEALTH_CALLS_MAX)
        self._health_watches = _Calls(HEALTH_WATCHES_MAX)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        """Returns a handler that checks the call and then runs the real one, or a handler that refuses it."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return handler
        method = handler_call_details.method
        if not self._is_authorized(handler_call_details.invocation_metadata):
            log_refused(method, Reason.TOKEN)
            return grpc.stream_stream_rpc_method_handler(_refuse)
        calls = self._calls
        if method.startswith(_HEALTH):
            calls = self._health_watches if method.endswith("/Watch") else self._health
        is_unary = not handler.response_streaming
        behavior = _answering if is_unary else _conversing if handler.request_streaming else _streaming
        behave = behavior(calls, handler)
        if traced := trace_context.read(handler_call_details.invocation_metadata or ()):
            behave = self._in_trace(behave, traced, method, is_unary=is_unary)
        behave = _ending(behave)
        if is_unary:  # `behave` returns encoded answers, so gRPC needs no serializer.
            return grpc.stream_unary_rpc_method_handler(behave, handler.request_deserializer)
        return grpc.stream_stream_rpc_method_handler(behave, handler.request_deserializer, handler.response_serializer)

    def _in_trace(self, behave: Behavior, parent: Metadata, method: str, *, is_unary: bool) -> Behavior:
        """Returns a handler that runs inside its caller's trace. A unary call gets a span; streams record their own."""
        tracing = self._tracing if is_unary else OFF

        async def run(requests: Any, context: Context) -> Any:
            span = tracing.begin(method.removeprefix("/"), parent)
            trace_context.carry(span.context)
            code = grpc.StatusCode.CANCELLED
            try:
                answer = await behave(requests, context)
                code = grpc.StatusCode.OK
            except aio.AbortError:
                code = context.code() or grpc.StatusCode.UNKNOWN
                raise
            finally:
                error = "" if code is grpc.StatusCode.OK else code.name
                span.end({
                    "rpc.system.name": "grpc", "rpc.method": method.removeprefix("/"),
                    "rpc.response.status_code": code.name, "error.type": error,
                })  # fmt: skip
            return answer

        return run

    def _is_authorized(self, metadata: Sequence[tuple[str, str | bytes]] | None) -> bool:
        if self._token is None:
            return True
        given = [value for key, value in metadata or () if key == "authorization"]
        if len(given) != 1:
            return False
        value = given[0].encode() if isinstance(given[0], str) else given[0]
        return is_bearer_of(value, self._token)


class _Place:
    """The place of one call.

    Attributes:
        timeout: the deadline for the call's message, while the server waits for it.
        byte_count: size of the request, later of the answer; 0 for small messages.
    """

    def __init__(self, caller: Hashable) -> None:
        self.caller = caller
        self.is_lost = False
        self.byte_count = 0
        self.timeout: asyncio.Timeout | None = None


class Arrivals:
    """Lets the messages of each caller arrive `MESSAGES_AT_ONCE_MAX` at a time."""

    def __init__(self) -> None:
        self._of_callers = weakref.WeakValueDictionary[Hashable, asyncio.Semaphore]()

    def of(self, caller: Hashable) -> asyncio.Semaphore:
        """Returns the caller's semaphore, which all reads of the caller's messages share."""
        semaphore = self._of_callers.get(caller)
        if semaphore is None:
            semaphore = self._of_callers[caller] = asyncio.Semaphore(MESSAGES_AT_ONCE_MAX)
        return semaphore


class _Calls:
    """Holds the places of one kind of calls."""

    def __init__(self, count_max: int) -> None:
        self._places = CallerShares(count_max // 2)
        self._bytes = CallerShares(MESSAGES_BYTES_MAX)
        self._arrivals = Arrivals()
        self._unread: dict[Hashable, dict[_Place, None]] = {}  # calls of each caller, longest wait first

    def place(self, context: Context) -> _Place:
        """Reserves a place for a call until it ends.

        A handler returns before its answer leaves. So an unread answer keeps its place.

        Raises:
            QuireError: LIMIT, no place is free.
        """
        caller = caller_of(context)
        while not self._places.take(caller):
            if not self._unread:
                text = (
                    f"too many calls at a time: this server runs at most {self._places.count_max} of this kind, "
                    "and one caller gets at most as many as are free; try again later"
                )
                raise QuireError.of(Reason.LIMIT, text)
            most = caller if caller in self._unread else max(self._unread, key=lambda each: len(self._unread[each]))
            self._lose(next(iter(self._unread[most])))
        place = _Place(caller)
        context.add_done_callback(lambda _: self._leave(place))  # type: ignore[arg-type]  # its stubs are wrong
        return place

    def _leave(self, place: _Place) -> None:
        if not place.is_lost:
            self._places.leave(place.caller)
        if place.byte_count:
            self._bytes.leave(place.caller, place.byte_count)

    async def read(self, place: _Place, context: Context) -> Any:
        """Returns the call's message.

        Raises:
            QuireError: IDLE, the message did not arrive in time; MALFORMED, it does not parse; LIMIT, its caller's
                messages take too many bytes, or another call displaced this one.
        """
        arriving = self._arrivals.of(place.caller)
        try:
            async with asyncio.timeout(MESSAGE_S) as place.timeout:
                self._unread.setdefault(place.caller, {})[place] = None
                async with arriving:
                    message = await context.read()
        except TimeoutError:
            raise QuireError.of(Reason.IDLE, f"the request message did not arrive within {MESSAGE_S:g} s") from None
        except DecodeError:
            message = aio.EOF  # type: ignore[attr-defined]
        finally:
            self._forget(place)
        if place.is_lost:
            raise QuireError.of(
                Reason.LIMIT,
                "the request message arrived too late: the server gave its place to another call; try again later",
            )
        if message is aio.EOF:  # type: ignore[attr-defined]
            raise QuireError.of(Reason.MALFORMED, "the request cannot be decoded as the message of this call")
        self.count(place, message.ByteSize())
        return message

    def count(self, place: _Place, size: int) -> None:
        """Sets the bytes that a call holds: first those of its request, later those of its answer.

        Raises:
            QuireError: LIMIT, the caller's requests and answers take too many bytes.
        """
        if place.byte_count:
            self._bytes.leave(place.caller, place.byte_count)
            place.byte_count = 0
        if size <= SMALL_BYTES:
            return
        if not self._bytes.take(place.caller, size):
            text = (
                f"too many bytes at a time: the requests of one caller may have {MESSAGES_BYTES_MAX:,} bytes "
                "together, or as many as other callers leave free; try again later"
            )
            raise QuireError.of(Reason.LIMIT, text)
        place.byte_count = size

    def _lose(self, place: _Place) -> None:
        """Ends a call that has not sent its message, and frees its place."""
        self._forget(place)
        self._places.leave(place.caller)
        place.is_lost = True
        assert place.timeout is not None
        place.timeout.reschedule(asyncio.get_running_loop().time())

    def _forget(self, place: _Place) -> None:
        unread = self._unread.get(place.caller, {})
        unread.pop(place, None)
        if not unread:
            self._unread.pop(place.caller, None)


async def _refuse(_requests: object, context: Context) -> None:
    await abort(context, QuireError.of(Reason.TOKEN, "this server requires a bearer token"))


def _ending(behavior: Behavior) -> Behavior:
    """Returns a handler that ends a refused call with its error, and frees the call's memory at once.

    gRPC stores the exception that ends a call in the call. The exception's traceback refers to the message and to the
    call: a cycle that stays in memory until the garbage collector runs, which is rare.
    """

    async def behave(requests: Any, context: Context) -> Any:
        try:
            try:
                return await behavior(requests, context)
            except QuireError as error:
                return await abort(context, error)
        except aio.AbortError as error:
            error.__traceback__ = error.__context__ = None
            raise

    return behave


def _answering(calls: _Calls, handler: Handler) -> Callable[[object, Context], Awaitable[Any]]:
    """Returns a handler for one answer in bytes: gRPC would keep the message, which is larger, until the bytes
    leave."""
    inner, serialize = handler.unary_unary, handler.response_serializer

    async def answer(_requests: object, context: Context) -> Any:
        try:
            place = calls.place(context)
            made = inner(await calls.read(place, context), context)
            answered: bytes = serialize(await made if inspect.isawaitable(made) else made)
            calls.count(place, ANSWER_COPIES * len(answered))
            return answered
        except QuireError as error:
            return await abort(context, error)

    return answer


def _streaming(calls: _Calls, handler: Handler) -> Callable[[object, Context], Awaitable[None]]:
    """Returns a handler for responses that `handler` either yields or, as a coroutine, writes to the context."""
    inner = handler.unary_stream

    async def stream(_requests: object, context: Context) -> None:
        request = await calls.read(calls.place(context), context)
        if not inspect.isasyncgenfunction(inner):
            await inner(request, context)
            return
        async with contextlib.aclosing(inner(request, context)) as messages:
            async for message in messages:
                await context.write(message)

    return stream


def _conversing(calls: _Calls, handler: Handler) -> Callable[[Any, Context], Awaitable[None]]:
    """Returns a handler that adds no coroutine to the real one: another coroutine would cost time for each message."""
    inner: Callable[[Any, Context], Awaitable[None]] = handler.stream_stream

    def converse(requests: Any, context: Context) -> Awaitable[None]:
        calls.place(context)
        return inner(requests, context)

    return converse
