"""Makes the sessions and engines that own pools for a client. Each session or engine has its own connection.

The asyncio and the blocking flavor are both written by hand: an owner sends heartbeats while its caller computes. So a
blocking client runs each owner on an event loop in its own thread.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Literal, TypeAlias

from quire._transport import messages, ranges
from quire._transport.channel import AsyncLink, SyncLink
from quire.engine import AsyncEngine, Engine
from quire.engine.carriers import CallCarrier, StreamCarrier
from quire.errors import QuireError
from quire.session import AsyncCallSession, AsyncSession, CallSession, Session
from quire.session.call import SessionStub
from quire.session.lookahead import AHEAD_TOKENS
from quire.types import PoolSpec

Transport: TypeAlias = Literal["stream", "calls"]
OnWait: TypeAlias = Callable[[QuireError], None]


def async_session(
    link: AsyncLink, pool: str, spec: PoolSpec, transport: Transport, **options: Any
) -> AsyncSession | AsyncCallSession:
    """Returns a session for asyncio. `options` are arguments of its class.

    Raises:
        ValueError: the transport is unknown.
        TypeError: sessions over this transport do not have the option.
    """
    if _is_stream(transport):
        return _stream(link, pool, spec, **options)
    return AsyncCallSession(link, pool, spec, **options)


def session(link: SyncLink, pool: str, spec: PoolSpec, transport: Transport, **options: Any) -> Session | CallSession:
    """Returns a session for threads. Takes the options of `async_session`, except `ahead_tokens`, and raises the same
    errors.
    """
    if not _is_stream(transport):
        return CallSession(link, pool, spec, **options)
    if "ahead_tokens" in options:
        raise TypeError(
            "a blocking session has no option ahead_tokens, because it never asks for room ahead: leave it out"
        )

    def connected() -> tuple[AsyncSession, Callable[[], Awaitable[None]]]:
        own = link.for_asyncio()
        return _stream(own, pool, spec, **options), own.close

    return Session(connected)


def async_engine(
    link: AsyncLink,
    pool: str,
    spec: PoolSpec,
    transport: Transport,
    *,
    ahead_tokens: int | None,
    on_wait: OnWait | None,
) -> AsyncEngine:
    """Returns an engine for asyncio.

    Raises:
        ValueError: the transport is unknown, or does not support `ahead_tokens`.
        InvalidArgumentError, TypeError: `ahead_tokens` is not a number of tokens.
    """
    if _is_stream(transport):
        room = AHEAD_TOKENS if ahead_tokens is None else ahead_tokens
        carrier = StreamCarrier(_stream(link, pool, spec, ahead_tokens=room, on_wait=on_wait))
        return AsyncEngine(pool, spec, carrier, room)
    if ahead_tokens:
        raise ValueError(
            f"ahead_tokens must be 0 or None, not {ahead_tokens}: transport='calls' never asks for room ahead"
        )
    calls = CallCarrier(lambda: AsyncCallSession(link, pool, spec), on_wait or (lambda _error: None))
    return AsyncEngine(pool, spec, calls, 0)


def engine(link: SyncLink, pool: str, spec: PoolSpec, transport: Transport, **options: Any) -> Engine:
    """Returns an engine for threads. Takes the options of `async_engine`, and raises the same errors."""

    def connected() -> tuple[AsyncEngine, Callable[[], Awaitable[None]]]:
        own = link.for_asyncio()
        return async_engine(own, pool, spec, transport, **options), own.close

    return Engine(connected)


def _stream(
    link: AsyncLink, pool: str, spec: PoolSpec, *, on_wait: OnWait | None = None, **options: int
) -> AsyncSession:
    """Makes a session on its own connection. A silent connection can then be replaced without ending other calls."""
    if "ahead_tokens" in options:
        ranges.check("ahead_tokens", options["ahead_tokens"], ranges.UINT32)
    own = link.another()

    async def reconnect() -> SessionStub:
        await own.reconnect()
        return SessionStub(own.channel)

    return AsyncSession(
        SessionStub(own.channel),
        pool,
        messages.pool_spec_message(spec),
        metadata=own.metadata,
        on_wait=None if on_wait is None else lambda error: on_wait(own.explain(error)),
        reconnect=reconnect,
        disconnect=own.close,
        **options,
    )


def _is_stream(transport: str) -> bool:
    if transport not in ("stream", "calls"):
        raise ValueError(f"transport must be 'stream' or 'calls', not {transport!r:.80}")
    return transport == "stream"
