"""A client of an allocator: it inspects, watches and owns pools."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal, overload

from quire import _owning, types, views
from quire._async.connection import AsyncConnected
from quire._async.streams import AsyncEventStream
from quire._transport import messages
from quire._transport.channel import DEFAULT_ALLOCATOR, UNARY_TIMEOUT_S, resolve_address
from quire._transport.messages import RESERVATION_S
from quire._transport.watch import Watch
from quire.engine import AsyncEngine
from quire.errors import QuireError
from quire.session import WINDOW, AsyncCallSession, AsyncSession
from quire.session.lookahead import AHEAD_TOKENS
from quire.tls import Tls
from quire.v1 import allocator_pb2 as pb
from quire.v1 import allocator_pb2_grpc as pb_grpc
from quire.v1 import server_pb2


class AsyncAllocator(AsyncConnected):
    """Inspects, watches and owns an allocator's pools.

    Args:
        allocator: address; by default $QUIRE_ALLOCATOR or 127.0.0.1:7070.
        token: bearer token; by default the content of the file that $QUIRE_TOKEN_FILE names, if set.
        tls: encrypts the connection; by default with the files that $QUIRE_TLS_CA, $QUIRE_TLS_CERT and $QUIRE_TLS_KEY
            name, if set. Without it a token is sent to this machine only.
        timeout_s: default timeout of each call.

    Made inside the event loop that uses it. A call that meets UNAVAILABLE is tried up to four times, 50 to 500 ms
    apart, within its timeout. Methods raise QuireError if the call fails. A refused operation (no space, say) is a
    result, not an error.
    """

    SERVICE = "quire.v1.AllocatorService"

    def __init__(
        self,
        allocator: str | None = None,
        *,
        token: str | None = None,
        tls: Tls | None = None,
        timeout_s: float = UNARY_TIMEOUT_S,
    ) -> None:
        super().__init__(resolve_address(allocator, "QUIRE_ALLOCATOR", DEFAULT_ALLOCATOR), token, tls, timeout_s)
        self._stub = pb_grpc.AllocatorServiceStub(self._link.channel)

    async def server_info(self, *, timeout_s: float | None = None) -> types.ServerInfo:
        """Returns the version, protocol, features and limits of the allocator."""
        request = server_pb2.GetServerInfoRequest()
        return messages.server_info(await self._link.call(self._stub.GetServerInfo, request, timeout_s))

    async def list_pools(self, *, timeout_s: float | None = None) -> tuple[views.PoolSummary, ...]:
        """Returns every attached pool, by name, without its quotas. Many pools take several calls."""
        request, pools = pb.ListPoolsRequest(), list[views.PoolSummary]()
        while True:
            page = await self._link.call(self._stub.ListPools, request, timeout_s)
            pools += map(messages.pool_summary, page.pools)
            if not page.next_page_token:
                return tuple(pools)
            request.page_token = page.next_page_token

    async def get_pool(self, pool: str, *, timeout_s: float | None = None) -> views.PoolSummary:
        """Returns the summary of one pool."""
        reply = await self._link.call(self._stub.GetPool, pb.GetPoolRequest(pool=pool), timeout_s)
        return messages.pool_summary(reply.summary)

    async def get_pool_blocks(self, pool: str, *, timeout_s: float | None = None) -> views.PoolBlocks:
        """Returns the holders of one pool's blocks. A large pool takes several calls, so its parts may be read at
        different times."""
        request, pages = pb.GetPoolBlocksRequest(pool=pool), list[pb.GetPoolBlocksResponse]()
        while not pages or pages[-1].next_page_token:
            request.page_token = pages[-1].next_page_token if pages else ""
            pages.append(await self._link.call(self._stub.GetPoolBlocks, request, timeout_s))
        return messages.pool_blocks(pages)

    async def get_pool_usage(self, pool: str, *, timeout_s: float | None = None) -> views.PoolUsage:
        """Returns how one pool's memory is used: namespaces, longest and most shared prefixes, fragmentation."""
        request = pb.GetPoolUsageRequest(pool=pool)
        return messages.pool_usage(await self._link.call(self._stub.GetPoolUsage, request, timeout_s))

    async def match_prefix(
        self, digests: bytes | Iterable[bytes], namespace: str = "", *, timeout_s: float | None = None
    ) -> tuple[views.PrefixMatch, ...]:
        """Returns the pools that have published a prefix of the prompt, longest match first. The answer is a hint: it
        reserves no blocks."""
        request = messages.match_request(digests, namespace)
        return messages.prefix_matches(await self._link.call(self._stub.MatchPrefix, request, timeout_s))

    async def route(
        self, model: str, digests: bytes | Iterable[bytes], prompt_token_count: int, namespace: str = "", *,
        adapter: str = "", excluded_pools: Iterable[str] = (), reservation_s: float = RESERVATION_S,
        timeout_s: float | None = None,
    ) -> views.Route:  # fmt: skip
        """Returns the worker for a prompt: the one with the least to compute.

        Args:
            model: name of the model.
            digests: digests of the prompt's full blocks, in order.
            prompt_token_count: tokens of the whole prompt.
            namespace: namespace of the request.
            adapter: name of the adapter on the model.
            excluded_pools: pools not to choose, such as those of workers that just failed.
            reservation_s: seconds for which the prompt counts among the worker's load, unless the worker admits it
                before; 0 for no reservation.
            timeout_s: timeout of the call.

        Raises:
            NotFoundError: MODEL_UNKNOWN, no worker serves the model and takes work.
        """
        request = messages.route_request(
            model, digests, prompt_token_count, namespace=namespace, adapter=adapter, reservation_s=reservation_s
        )
        request.excluded_pools.extend(excluded_pools)
        reply = await self._link.call(self._stub.Route, request, timeout_s)
        return views.Route(**messages.values_of(reply))

    async def drop_cache(
        self, pool: str, namespace: str | None = None, digests: bytes | Iterable[bytes] | None = None,
        kept_digest_count: int = 0, *, timeout_s: float | None = None,
    ) -> views.CacheDropped:  # fmt: skip
        """Drops cached blocks: of the whole pool, of one namespace, or of one prefix in it behind its first
        `kept_digest_count` digests. Blocks that sequences hold stay. The caller needs permission to own the pool.

        Raises:
            ValueError: `digests` are empty, as those of a prompt shorter than a block.
        """
        request = messages.drop_request(pool, namespace, digests, kept_digest_count)
        reply = await self._link.call(self._stub.DropCache, request, timeout_s)
        return views.CacheDropped(**messages.values_of(reply))

    def watch_events(
        self,
        pool: str,
        session_id: bytes = b"",
        cursor: int = 0,
        *,
        timeout_s: float | None = None,
        on_wait: Callable[[QuireError], None] | None = None,
    ) -> AsyncEventStream:
        """Returns a stream of every change to the cached prefixes of one pool, in order; see `quire.events`.

        Args:
            pool: its name.
            session_id: with `cursor`, resumes where an earlier stream ended. If that is no longer possible, and by
                default, the watch begins with a snapshot.
            cursor: the earlier stream's cursor.
            timeout_s: how long to watch. By default until the stream is closed.
            on_wait: called with the error whenever the watch is interrupted and resumes.

        A watch that meets UNAVAILABLE after it has begun resumes after the last event. The watch retries without a
        limit, with pauses of 50 ms to 5 s.

        Raises:
            NotFoundError: while iterating: the pool is unknown or gone. After a restart of the allocator, a pool is
                unknown until its owner has attached again.
            ResourceExhaustedError: while iterating: WATCHER_SLOW, events came faster than they were read; or LIMIT,
                the allocator has too many watchers.
            QuireError: while iterating: any other failure of a call.
        """
        request = messages.watch_request(pool, session_id, cursor)
        watch = Watch(self._link, self._stub.WatchEvents, request, timeout_s=timeout_s, on_wait=on_wait)
        return AsyncEventStream(self._link, watch)

    @overload
    def session(
        self,
        pool: str,
        spec: types.PoolSpec,
        *,
        transport: Literal["stream"] = "stream",
        window: int = WINDOW,
        ahead_tokens: int = AHEAD_TOKENS,  # asyncio only
        on_wait: Callable[[QuireError], None] | None = None,
    ) -> AsyncSession: ...

    @overload
    def session(
        self,
        pool: str,
        spec: types.PoolSpec,
        *,
        transport: Literal["calls"],
        keep_alive: bool = True,
        request_id: str | None = None,
    ) -> AsyncCallSession: ...

    def session(
        self, pool: str, spec: types.PoolSpec, *, transport: Literal["stream", "calls"] = "stream", **options: Any
    ) -> AsyncSession | AsyncCallSession:
        """Returns a session. The session owns a pool from its `open`, or the beginning of `async with`, until its
        `close`.

        Over "stream", steps are numbered messages on a separate connection, and the pool outlives the allocator: see
        docs/session.md. Over "calls", each step is a unary call on this client's connection.

        Args:
            pool: its name.
            spec: its specification.
            transport: "stream" or "calls".
            **options: over "stream": `window` (steps that may be unanswered at a time, 1 to 8), `on_wait` (called with
                the error before each retry of attaching) and, for asyncio only, `ahead_tokens` (future tokens for which
                a decoding sequence should hold slots, beyond its next token). Over "calls": `keep_alive` (renews the
                lease in the background; without it only steps renew the lease) and `request_id` (a second `open` with
                the same id returns the same session).

        Raises:
            ValueError, TypeError: the transport is unknown, or does not have this option.
        """
        return _owning.async_session(self._link, pool, spec, transport, **options)

    def engine(
        self,
        pool: str,
        spec: types.PoolSpec,
        *,
        transport: Literal["stream", "calls"] = "stream",
        ahead_tokens: int | None = None,
        on_wait: Callable[[QuireError], None] | None = None,
    ) -> AsyncEngine:
        """Returns an engine. The session owns a pool from its `open`, or the beginning of `async with`, until its
        `close`.

        A turn is one step. Over "stream", the pool outlives the allocator. Over "calls", each step is a unary call, and
        the pool is lost with the allocator. See docs/engine.md.

        Args:
            pool: its name.
            spec: its specification.
            transport: "stream" or "calls".
            ahead_tokens: future tokens for which a sequence should hold slots, beyond its next token. The sequence can
                decode that far during an outage. The default over "stream" is 64. Over "calls" there is none.
            on_wait: called with the error before each retry of attaching or of a call.

        Raises:
            ValueError: the transport is unknown, or `ahead_tokens` is set over "calls".
        """
        return _owning.async_engine(
            self._link, pool, spec, transport=transport, ahead_tokens=ahead_tokens, on_wait=on_wait
        )
