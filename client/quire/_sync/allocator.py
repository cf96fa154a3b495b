# Generated from _async/allocator.py by scripts/unasync.py. Change that file, then run `make format`.
"""A client of an allocator: what its pools hold, and ownership of one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal, overload

from quire import _owning, types, views
from quire._sync.connection import Connected
from quire._sync.streams import EventStream
from quire._transport import messages
from quire._transport.channel import DEFAULT_ALLOCATOR, UNARY_TIMEOUT_S, resolve_address
from quire._transport.watch import Watch
from quire.engine import Engine
from quire.errors import QuireError
from quire.session import WINDOW, CallSession, Session
from quire.tls import Tls
from quire.v1 import allocator_pb2 as pb
from quire.v1 import allocator_pb2_grpc as pb_grpc
from quire.v1 import server_pb2


class Allocator(Connected):
    """Pools and their blocks.

    Args:
        allocator: address; by default $QUIRE_ALLOCATOR or 127.0.0.1:7070.
        token: bearer token; by default the content of the file that $QUIRE_TOKEN_FILE names, if set.
        tls: encrypts the connection; by default with the files that $QUIRE_TLS_CA, $QUIRE_TLS_CERT and $QUIRE_TLS_KEY
            name, if set. Without it a token is sent to this machine only.
        timeout_s: for each call.

    A call that meets UNAVAILABLE is tried four times, 50 to 500 ms apart, all
    within its time; `generate` and `stream` only until the first chunk. Methods raise QuireError where the call fails.
    What an operation answers (no space, say) is a result.
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

    def server_info(self, *, timeout_s: float | None = None) -> types.ServerInfo:
        """Returns the version, protocol, features and limits of the allocator."""
        request = server_pb2.GetServerInfoRequest()
        return messages.server_info(self._link.call(self._stub.GetServerInfo, request, timeout_s))

    def list_pools(self, *, timeout_s: float | None = None) -> tuple[views.PoolSummary, ...]:
        """Returns every attached pool, by name, without its quotas. Many pools take several calls."""
        request, pools = pb.ListPoolsRequest(), list[views.PoolSummary]()
        while True:
            page = self._link.call(self._stub.ListPools, request, timeout_s)
            pools += map(messages.pool_summary, page.pools)
            if not page.next_page_token:
                return tuple(pools)
            request.page_token = page.next_page_token

    def get_pool(self, pool: str, *, timeout_s: float | None = None) -> views.PoolSummary:
        """Returns one pool in a few numbers."""
        reply = self._link.call(self._stub.GetPool, pb.GetPoolRequest(pool=pool), timeout_s)
        return messages.pool_summary(reply.summary)

    def get_pool_blocks(self, pool: str, *, timeout_s: float | None = None) -> views.PoolBlocks:
        """Says who holds what in one pool. A large one takes several calls, so that its parts are not of one
        instant."""
        request, pages = pb.GetPoolBlocksRequest(pool=pool), list[pb.GetPoolBlocksResponse]()
        while not pages or pages[-1].next_page_token:
            request.page_token = pages[-1].next_page_token if pages else ""
            pages.append(self._link.call(self._stub.GetPoolBlocks, request, timeout_s))
        return messages.pool_blocks(pages)

    def get_pool_usage(self, pool: str, *, timeout_s: float | None = None) -> views.PoolUsage:
        """Returns where the memory of one pool goes: namespaces, longest and most shared prefixes, fragmentation."""
        request = pb.GetPoolUsageRequest(pool=pool)
        return messages.pool_usage(self._link.call(self._stub.GetPoolUsage, request, timeout_s))

    def match_prefix(
        self, digests: bytes | Iterable[bytes], namespace: str = "", *, timeout_s: float | None = None
    ) -> tuple[views.PrefixMatch, ...]:
        """Pools that have published the beginning of a prompt, longest first. A hint that holds nothing."""
        request = messages.match_request(digests, namespace)
        return messages.prefix_matches(self._link.call(self._stub.MatchPrefix, request, timeout_s))

    def drop_cache(
        self, pool: str, namespace: str | None = None, digests: bytes | Iterable[bytes] = b"",
        kept_digest_count: int = 0, *, timeout_s: float | None = None,
    ) -> views.CacheDropped:  # fmt: skip
        """Forgets what is cached of a pool: all of it, of a namespace, or of that what stands behind the kept ones of a
        prefix's digests. What sequences hold stays. It takes permission to own the pool."""
        request = messages.drop_request(pool, namespace, digests, kept_digest_count)
        reply = self._link.call(self._stub.DropCache, request, timeout_s)
        return views.CacheDropped(**messages.values_of(reply))

    def watch_events(
        self,
        pool: str,
        session_id: bytes = b"",
        cursor: int = 0,
        *,
        timeout_s: float | None = None,
        on_wait: Callable[[QuireError], None] | None = None,
    ) -> EventStream:
        """Returns every change of what one pool can hit, in order; see `quire.events`.

        Args:
            pool: its name.
            session_id: with `cursor`, to go on where an earlier stream ended. Where that is not possible any more, and
                by default, the watch begins with a snapshot.
            cursor: of that stream.
            timeout_s: how long to watch; without it, until the stream is closed.
            on_wait: called with the error whenever the watch was cut off and is resumed.

        A watch that has begun and meets UNAVAILABLE goes on after the last event, however long that takes, with pauses
        of 50 ms to 5 s.

        Raises:
            NotFoundError: while iterating: the pool is unknown, or gone; after a restart of the allocator it is unknown
                until its owner has attached again.
            ResourceExhaustedError: while iterating: WATCHER_SLOW, events came faster than they were taken; LIMIT, too
                many watch.
            QuireError: while iterating: anything else that a call may meet.
        """
        request = messages.watch_request(pool, session_id, cursor)
        watch = Watch(self._link, self._stub.WatchEvents, request, timeout_s=timeout_s, on_wait=on_wait)
        return EventStream(self._link, watch)

    @overload
    def session(
        self,
        pool: str,
        spec: types.PoolSpec,
        *,
        transport: Literal["stream"] = "stream",
        window: int = WINDOW,
        on_wait: Callable[[QuireError], None] | None = None,
    ) -> Session: ...

    @overload
    def session(
        self,
        pool: str,
        spec: types.PoolSpec,
        *,
        transport: Literal["calls"],
        keep_alive: bool = True,
        request_id: str | None = None,
    ) -> CallSession: ...

    def session(
        self, pool: str, spec: types.PoolSpec, *, transport: Literal["stream", "calls"] = "stream", **options: Any
    ) -> Session | CallSession:
        """Returns a session that owns a pool from its `open`, or the beginning of `with`, until its `close`.

        Over "stream", steps are numbered messages on a connection of its own, and the pool outlives the allocator: see
        docs/session.md. Over "calls" each step is a unary call on this client's connection.

        Args:
            pool: its name.
            spec: its specification.
            transport: "stream" or "calls".
            **options: over "stream" `window` (steps that may be unanswered at a time, 1 to 8), `on_wait` (gets the
                reason whenever attaching has to be tried again) and, for asyncio only, `ahead_tokens` (room that a
                decoding sequence should have beyond its next token). Over "calls" `keep_alive` (renews the lease in
                the background; without it only steps do) and `request_id` (opening again with the same id takes the
                same session again).

        Raises:
            ValueError, TypeError: there is no such transport, or it has no such option.
        """
        return _owning.session(self._link, pool, spec, transport, **options)

    def engine(
        self,
        pool: str,
        spec: types.PoolSpec,
        *,
        transport: Literal["stream", "calls"] = "stream",
        ahead_tokens: int | None = None,
        on_wait: Callable[[QuireError], None] | None = None,
    ) -> Engine:
        """Returns an engine that owns a pool from its `open`, or the beginning of `with`, until its `close`.

        A turn is one step. Over "stream" the pool outlives the allocator. Over "calls" each step is a unary call, and
        the pool is lost with the allocator. See docs/engine.md.

        Args:
            pool: its name.
            spec: its specification.
            transport: "stream" or "calls".
            ahead_tokens: room that a sequence should have beyond its next token, for outages of that length: by default
                64 over "stream"; "calls" has none.
            on_wait: called with the error whenever attaching, or a call, has to be tried again.

        Raises:
            ValueError: there is no such transport, or room ahead is wanted over "calls".
        """
        return _owning.engine(self._link, pool, spec, transport=transport, ahead_tokens=ahead_tokens, on_wait=on_wait)
