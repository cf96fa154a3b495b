"""Clients for threads and scripts; `quire.aio` has the same ones for asyncio."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import ClassVar, Self, Unpack

from grpc_health.v1 import health_pb2, health_pb2_grpc

from quire import _messages as messages
from quire import types, views
from quire._channel import (
    DEFAULT_ALLOCATOR,
    DEFAULT_WORKER,
    GENERATE_TIMEOUT_S,
    UNARY_TIMEOUT_S,
    Attempts,
    SyncLink,
    resolve_address,
)
from quire._streams import ChunkStream, EventStream
from quire._watch import Watch
from quire.errors import NotFoundError, QuireError
from quire.steps import Result
from quire.tls import Tls
from quire.v1 import allocator_pb2 as pb
from quire.v1 import allocator_pb2_grpc as pb_grpc
from quire.v1 import worker_pb2 as worker_pb
from quire.v1 import worker_pb2_grpc as worker_pb_grpc


class _Connected:
    """Opening, closing and health of a client."""

    SERVICE: ClassVar[str]

    def __init__(self, address: str, token: str | None, tls: Tls | None, timeout_s: float) -> None:
        self._link = SyncLink(address, token, tls, timeout_s)

    @property
    def address(self) -> str:
        """Where calls go."""
        return self._link.address

    def health(self, *, timeout_s: float | None = None) -> bool:
        """Whether the service says that it is serving (grpc.health.v1).

        Raises:
            QuireError: nobody answers, or the token is refused.
        """
        stub = health_pb2_grpc.HealthStub(self._link.channel)
        request = health_pb2.HealthCheckRequest(service=self.SERVICE)
        try:
            status = self._link.call(stub.Check, request, timeout_s).status
        except NotFoundError:  # another service listens there
            return False
        return bool(status == health_pb2.HealthCheckResponse.SERVING)

    def close(self) -> None:
        """Ends the connection and every stream on it."""
        self._link.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Client(_Connected):
    """Text from a worker.

    Args:
        worker: address; by default $QUIRE_WORKER or 127.0.0.1:7071.
        token: bearer token; by default the content of the file that $QUIRE_TOKEN_FILE names, if set.
        tls: encrypts the connection; by default with the files that $QUIRE_TLS_CA, $QUIRE_TLS_CERT and $QUIRE_TLS_KEY
            name, if set. Without it a token is sent to this machine only.
        timeout_s: for each call but `generate` and `stream`, which have 600 seconds unless they are given another.

    All methods raise QuireError where the call fails.
    """

    SERVICE = "quire.v1.WorkerService"

    def __init__(
        self,
        worker: str | None = None,
        *,
        token: str | None = None,
        tls: Tls | None = None,
        timeout_s: float = UNARY_TIMEOUT_S,
    ) -> None:
        super().__init__(resolve_address(worker, "QUIRE_WORKER", DEFAULT_WORKER), token, tls, timeout_s)
        self._stub = worker_pb_grpc.WorkerServiceStub(self._link.channel)

    def generate(
        self,
        prompt: str | Sequence[int],
        params: types.SamplingParams | None = None,
        *,
        namespace: str = "",
        request_id: str | None = None,
        timeout_s: float | None = None,
        **options: Unpack[types.SamplingOptions],
    ) -> types.Generation:
        """Continues a prompt (text, or token ids) and waits for the whole of it.

        Sampling comes from `params`, from keyword arguments of the same names as its fields, or both; the latter win.
        """
        with self.stream(
            prompt, params, namespace=namespace, request_id=request_id, timeout_s=timeout_s, **options
        ) as chunks:
            return messages.gather(chunks, chunks.request_id)

    def stream(
        self,
        prompt: str | Sequence[int],
        params: types.SamplingParams | None = None,
        *,
        namespace: str = "",
        request_id: str | None = None,
        timeout_s: float | None = None,
        **options: Unpack[types.SamplingOptions],
    ) -> ChunkStream:
        """As `generate`, but gives each piece as it comes; samples of one request come interleaved."""
        request = messages.generate_request(prompt, params, options, namespace, request_id)
        timeout_s = GENERATE_TIMEOUT_S if timeout_s is None else timeout_s
        attempts = Attempts(self._stub.Generate, request, messages.chunk, timeout_s, self._link.metadata)
        return ChunkStream(self._link, attempts, request.request_id)

    def status(self, *, timeout_s: float | None = None) -> types.WorkerStatus:
        """What the worker is and does."""
        reply = self._link.call(self._stub.GetStatus, worker_pb.GetStatusRequest(), timeout_s)
        return messages.worker_status(reply)


class AllocatorClient(_Connected):
    """Pools and their blocks.

    Args:
        allocator: address; by default $QUIRE_ALLOCATOR or 127.0.0.1:7070.
        token: bearer token; by default the content of the file that $QUIRE_TOKEN_FILE names, if set.
        tls: encrypts the connection; by default with the files that $QUIRE_TLS_CA, $QUIRE_TLS_CERT and $QUIRE_TLS_KEY
            name, if set. Without it a token is sent to this machine only.
        timeout_s: for each call.

    All methods raise QuireError where the call fails. What an operation answers (no space, say) is a result.
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

    def list_pools(self, *, timeout_s: float | None = None) -> tuple[views.PoolSummary, ...]:
        """Every attached pool, by name."""
        reply = self._link.call(self._stub.ListPools, pb.ListPoolsRequest(), timeout_s)
        return tuple(map(messages.pool_summary, reply.pools))

    def get_pool(self, pool: str, *, timeout_s: float | None = None) -> views.PoolSummary:
        """One pool in a few numbers."""
        reply = self._link.call(self._stub.GetPool, pb.GetPoolRequest(pool=pool), timeout_s)
        return messages.pool_summary(reply.summary)

    def get_pool_blocks(self, pool: str, *, timeout_s: float | None = None) -> views.PoolBlocks:
        """Who holds what in one pool. A large one takes several calls, so that its parts are not of one instant."""
        request: pb.GetPoolRequest | None = pb.GetPoolRequest(pool=pool, view=pb.POOL_VIEW_BLOCKS)
        pages = []
        while request is not None:
            pages.append(self._link.call(self._stub.GetPool, request, timeout_s))
            request = messages.next_page(request, pages[-1])
        return messages.pool_blocks(pages)

    def get_pool_usage(self, pool: str, *, timeout_s: float | None = None) -> views.PoolUsage:
        """Where the memory of one pool goes: namespaces, longest and most shared prefixes, fragmentation."""
        request = pb.GetPoolRequest(pool=pool, view=pb.POOL_VIEW_USAGE)
        return messages.pool_usage(self._link.call(self._stub.GetPool, request, timeout_s))

    def match_prefix(
        self, digests: bytes | Iterable[bytes], namespace: str = "", *, timeout_s: float | None = None
    ) -> tuple[views.PrefixMatch, ...]:
        """Pools that have published the beginning of a prompt, longest first. A hint that holds nothing."""
        request = messages.match_request(digests, namespace)
        return messages.prefix_matches(self._link.call(self._stub.MatchPrefix, request, timeout_s))

    def watch_events(
        self,
        pool: str,
        session_id: bytes = b"",
        cursor: int = 0,
        *,
        timeout_s: float | None = None,
        on_wait: Callable[[QuireError], None] | None = None,
    ) -> EventStream:
        """Every change of what one pool can hit, in order; see `quire.events`.

        Args:
            pool: its name.
            session_id: with `cursor`, to go on where an earlier stream ended. Where that is not possible any more, and
                by default, the watch begins with a snapshot.
            cursor: of that stream.
            timeout_s: how long to watch; without it, until the stream is closed.
            on_wait: told why, whenever the watch was cut off and is taken up again.

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

    def open_session(
        self, pool: str, spec: types.PoolSpec, *, request_id: str | None = None, timeout_s: float | None = None
    ) -> UnarySession:
        """Takes ownership of an empty pool; a repeated `request_id` takes the same one again."""
        request = messages.open_request(pool, spec, request_id)
        reply = self._link.call(self._stub.OpenSession, request, timeout_s)
        return UnarySession(self._link, self._stub, pool, reply)


class UnarySession:
    """Ownership of one pool without a stream; leaving the `with` block gives it back.

    The allocator drops the pool after `lease_ms` without a call. Each operation takes a `request_id`, a new one by
    default: repeated with the same id and content it returns the first answer and does nothing.
    """

    def __init__(
        self, link: SyncLink, stub: pb_grpc.AllocatorServiceStub, pool: str, opened: pb.OpenSessionResponse
    ) -> None:
        self.pool = pool
        self.session_id = opened.session_id
        self.lease_ms = opened.lease_ms
        self._link = link
        self._stub = stub

    def allocate(
        self,
        sequence_id: int,
        token_count: int,
        digests: bytes | Iterable[bytes] = (),
        namespace: str = "",
        *,
        prompt_token_count: int = 0,
        priority: int = 0,
        defer_token_count: int = 0,
        request_id: str | None = None,
        timeout_s: float | None = None,
    ) -> types.Allocation:
        """A new sequence that shares what `digests` hit: OK, NO_SPACE, EXISTS, TOO_LONG, PENDING or QUOTA.

        Args:
            sequence_id: higher than every earlier one.
            token_count: tokens to hold, at least 1; it holds more where more of a longer prompt is shared.
            digests: of the prompt's blocks in order, as many as may be shared; one by one or concatenated.
            namespace: prefixes are shared inside it.
            prompt_token_count: length of the whole prompt, where `token_count` is only its first chunk: it is let in
                only if all of it would fit, and the rest is kept free from later admissions.
            priority: for a sequence of one priority none of a higher one is ever named as a victim.
            defer_token_count: answer PENDING if others are computing at least so many tokens of its prefix; 0: never.
            request_id: of this operation; see above.
            timeout_s: for this call.
        """
        request = messages.allocate_request(
            self.session_id,
            request_id,
            digests=digests,
            namespace=namespace,
            sequence_id=sequence_id,
            token_count=token_count,
            prompt_token_count=prompt_token_count,
            priority=priority,
            defer_token_count=defer_token_count,
        )
        return messages.allocation(self._link.call(self._stub.Allocate, request, timeout_s))

    def grow(
        self, sequence_id: int, token_count: int, *, request_id: str | None = None, timeout_s: float | None = None
    ) -> types.Growth:
        """Room for `token_count` tokens of a live sequence: OK, NO_SPACE, NOT_FOUND, TOO_LONG or QUOTA."""
        request = messages.grow_request(self.session_id, request_id, sequence_id, token_count)
        return messages.growth(self._link.call(self._stub.Grow, request, timeout_s))

    def fork(
        self,
        parent_id: int,
        child_id: int,
        *,
        hold_ms: int = 0,
        request_id: str | None = None,
        timeout_s: float | None = None,
    ) -> Result:
        """A new sequence (ids only rise) that shares every computed block of a live one.

        OK, NOT_FOUND, EXISTS, or UNCOMMITTED: a pool with STATE groups, and a parent with granted tokens that are not
        committed. With `hold_ms`, up to a day, it is a hold: nobody writes to it, and after so many milliseconds it is
        freed by itself.
        """
        request = messages.fork_request(self.session_id, request_id, parent_id, child_id, hold_ms)
        return Result(self._link.call(self._stub.Fork, request, timeout_s).result)

    def commit(
        self,
        sequence_id: int,
        token_count: int,
        digests: bytes | Iterable[bytes] = (),
        *,
        keep_token_count: int = 0,
        request_id: str | None = None,
        timeout_s: float | None = None,
    ) -> types.CommitOutcome:
        """Tokens up to `token_count` are computed: OK, NOT_FOUND or TOO_LONG.

        One digest for each `block_size` of the pool that this fills publishes them, another number is MALFORMED. With
        `keep_token_count`, blocks that are not needed to hold so many tokens, nor `token_count`, are given back: those
        granted ahead for draft tokens that were not accepted.
        """
        request = messages.commit_request(
            self.session_id,
            request_id,
            digests=digests,
            sequence_id=sequence_id,
            token_count=token_count,
            keep_token_count=keep_token_count,
        )
        return messages.commit_outcome(sequence_id, self._link.call(self._stub.Commit, request, timeout_s))

    def free(self, sequence_id: int, *, request_id: str | None = None, timeout_s: float | None = None) -> Result:
        """Drops a sequence."""
        request = messages.free_request(self.session_id, request_id, sequence_id)
        return Result(self._link.call(self._stub.Free, request, timeout_s).result)

    def keep_alive(self, *, timeout_s: float | None = None) -> int:
        """Renews the lease and returns its length in milliseconds; every other call renews it too."""
        request = pb.KeepAliveRequest(session_id=self.session_id)
        return self._link.call(self._stub.KeepAlive, request, timeout_s).lease_ms

    def close(self, *, timeout_s: float | None = None) -> None:
        """Gives the pool back; closing twice is no error."""
        self._link.call(self._stub.CloseSession, pb.CloseSessionRequest(session_id=self.session_id), timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, error: BaseException | None, _traceback: TracebackType | None
    ) -> None:
        # What went wrong inside the block must not be hidden by a failure to close; the lease ends by itself.
        with contextlib.suppress(QuireError) if error is not None else contextlib.nullcontext():
            self.close()
