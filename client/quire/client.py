"""Clients for threads and scripts; `quire.aio` has the same ones for asyncio."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Self, Unpack

from grpc_health.v1 import health_pb2, health_pb2_grpc

from quire import sampling, types, views
from quire._transport import conversations, generating, messages
from quire._transport.channel import (
    DEFAULT_ALLOCATOR,
    DEFAULT_WORKER,
    GENERATE_TIMEOUT_S,
    UNARY_TIMEOUT_S,
    Attempts,
    SyncLink,
    resolve_address,
)
from quire._transport.streams import ChunkStream, EventStream
from quire._transport.watch import Watch
from quire.aio import AsyncAllocatorClient
from quire.blocking import BlockingSession
from quire.branches import BranchKeeper, Prefills
from quire.engine.blocking import Engine
from quire.engine.turns import AsyncEngine
from quire.errors import NotFoundError, QuireError
from quire.session import WINDOW, PoolSession
from quire.session.lookahead import AHEAD_TOKENS
from quire.tls import Tls
from quire.unary import UnarySession
from quire.v1 import allocator_pb2 as pb
from quire.v1 import allocator_pb2_grpc as pb_grpc
from quire.v1 import worker_pb2 as worker_pb
from quire.v1 import worker_pb2_grpc as worker_pb_grpc


class _Connected:
    """Opening, closing and health of a client."""

    SERVICE: ClassVar[str]

    def __init__(self, address: str, token: str | None, tls: Tls | None, timeout_s: float) -> None:
        self._link = SyncLink(address, token, tls, timeout_s)
        self._link.server = "worker" if self.SERVICE == "quire.v1.WorkerService" else "allocator"

    @property
    def address(self) -> str:
        """Returns the address that calls go to."""
        return self._link.address

    def health(self, *, timeout_s: float | None = None) -> bool:
        """Tells whether the service says that it is serving (grpc.health.v1).

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

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.address}>"

    def close(self) -> None:
        """Ends the connection and every stream on it."""
        self._link.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Client(Prefills, _Connected):
    """Text from a worker.

    Args:
        worker: address; by default $QUIRE_WORKER or 127.0.0.1:7071.
        token: bearer token; by default the content of the file that $QUIRE_TOKEN_FILE names, if set.
        tls: encrypts the connection; by default with the files that $QUIRE_TLS_CA, $QUIRE_TLS_CERT and $QUIRE_TLS_KEY
            name, if set. Without it a token is sent to this machine only.
        timeout_s: for each call but `generate` and `stream`, which have 600 seconds unless they are given another.

    A call that meets UNAVAILABLE is tried four times, 50 to 500 ms apart, all within its time; `generate` and `stream`
    only until the first chunk. All methods raise QuireError where the call fails.
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
        self._branches = BranchKeeper(self._link, self._stub)

    def generate(
        self,
        prompt: str | Sequence[int],
        params: sampling.SamplingParams | None = None,
        *,
        namespace: str = "",
        adapter: str = "",
        priority: int = 0,
        request_id: str | None = None,
        timeout_s: float | None = None,
        **options: Unpack[sampling.SamplingOptions],
    ) -> sampling.Generation:
        """Continues a prompt (text, or token ids) and waits for the whole of it.

        Sampling comes from `params`, from keyword arguments of the same names as its fields, or both; the latter win.
        `priority`, from -10 to 10, counts among the requests of its namespace; larger is sooner.
        """
        with self.stream(
            prompt, params, namespace=namespace, adapter=adapter, priority=priority, request_id=request_id,
            timeout_s=timeout_s, interval_s=generating.WHOLE_INTERVAL_S, **options,
        ) as chunks:  # fmt: skip
            return generating.gather(chunks, chunks.request_id)

    def stream(
        self,
        prompt: str | Sequence[int],
        params: sampling.SamplingParams | None = None,
        *,
        namespace: str = "",
        adapter: str = "",
        priority: int = 0,
        request_id: str | None = None,
        timeout_s: float | None = None,
        interval_s: float = 0.0,
        **options: Unpack[sampling.SamplingOptions],
    ) -> ChunkStream:
        """Does what `generate` does, but gives each piece as it comes; samples of one request come interleaved.

        Pieces of a request come `interval_s` seconds apart at least, but for its first one and those that end a sample:
        fewer cost less. The worker's own `--stream-interval-ms` counts where it is longer.
        """
        request = generating.generate_request(
            prompt, params, options, namespace=namespace, adapter=adapter, request_id=request_id, priority=priority,
            interval_s=interval_s,
        )  # fmt: skip
        timeout_s = GENERATE_TIMEOUT_S if timeout_s is None else timeout_s
        attempts = Attempts(self._link, self._stub.Generate, request, generating.chunk, timeout_s)
        return ChunkStream(self._link, attempts, request.request_id)

    def close(self) -> None:
        """Ends the connection and every stream on it. Branches end when their time runs out."""
        self._branches.stop()
        super().close()

    def tokenize(
        self,
        prompt: str | Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] = types.NO_VARIABLES,
        with_generation_prompt: bool = True,
        timeout_s: float | None = None,
    ) -> tuple[int, ...]:
        """Returns the tokens of a text, or of a conversation (messages, as dictionaries with `role` and `content`) as
        the checkpoint's chat template writes it down. Both can be the prompt of `generate`.

        Args:
            prompt: the text, or the messages.
            tools: that the model may call, for the template.
            variables: further ones of the template.
            with_generation_prompt: whether the text goes on to where the assistant's answer begins.
            timeout_s: for this call.
        """
        request = conversations.tokenize_request(prompt, tools, variables, with_generation_prompt)
        return tuple(self._link.call(self._stub.Tokenize, request, timeout_s).token_ids)

    def detokenize(self, token_ids: Sequence[int], *, timeout_s: float | None = None) -> tuple[bytes, ...]:
        """Returns what each token is by itself: bytes that need not be whole characters."""
        request = worker_pb.DetokenizeRequest(token_ids=token_ids)
        return tuple(self._link.call(self._stub.Detokenize, request, timeout_s).texts)

    def status(self, *, timeout_s: float | None = None) -> types.WorkerStatus:
        """Returns what the worker is and does."""
        reply = self._link.call(self._stub.GetStatus, worker_pb.GetStatusRequest(), timeout_s)
        return messages.worker_status(reply)

    def load_adapter(self, name: str, folder: str, *, timeout_s: float | None = None) -> types.AdapterInfo:
        """Loads a LoRA adapter from a folder below the worker's --adapter-folder; requests choose it by name."""
        request = worker_pb.LoadAdapterRequest(name=name, folder=folder)
        return messages.adapter_info(self._link.call(self._stub.LoadAdapter, request, timeout_s).adapter)

    def unload_adapter(self, name: str, *, timeout_s: float | None = None) -> None:
        """Drops an adapter that no request has."""
        self._link.call(self._stub.UnloadAdapter, worker_pb.UnloadAdapterRequest(name=name), timeout_s)

    def list_adapters(self, *, timeout_s: float | None = None) -> tuple[types.AdapterInfo, ...]:
        """Returns the adapters that are loaded, by name."""
        reply = self._link.call(self._stub.ListAdapters, worker_pb.ListAdaptersRequest(), timeout_s)
        return tuple(map(messages.adapter_info, reply.adapters))


class AllocatorClient(_Connected):
    """Pools and their blocks.

    Args:
        allocator: address; by default $QUIRE_ALLOCATOR or 127.0.0.1:7070.
        token: bearer token; by default the content of the file that $QUIRE_TOKEN_FILE names, if set.
        tls: encrypts the connection; by default with the files that $QUIRE_TLS_CA, $QUIRE_TLS_CERT and $QUIRE_TLS_KEY
            name, if set. Without it a token is sent to this machine only.
        timeout_s: for each call.

    A call that meets UNAVAILABLE is tried four times, 50 to 500 ms apart, all within its time; `generate` and `stream`
    only until the first chunk. All methods raise QuireError where the call fails. What an operation answers (no space,
    say) is a result.
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
        self._credentials = token, tls
        self._stub = pb_grpc.AllocatorServiceStub(self._link.channel)

    def list_pools(self, *, timeout_s: float | None = None) -> tuple[views.PoolSummary, ...]:
        """Returns every attached pool, by name."""
        reply = self._link.call(self._stub.ListPools, pb.ListPoolsRequest(), timeout_s)
        return tuple(map(messages.pool_summary, reply.pools))

    def get_pool(self, pool: str, *, timeout_s: float | None = None) -> views.PoolSummary:
        """Returns one pool in a few numbers."""
        reply = self._link.call(self._stub.GetPool, pb.GetPoolRequest(pool=pool), timeout_s)
        return messages.pool_summary(reply.summary)

    def get_pool_blocks(self, pool: str, *, timeout_s: float | None = None) -> views.PoolBlocks:
        """Says who holds what in one pool. A large one takes several calls, so that its parts are not of one
        instant."""
        request: pb.GetPoolRequest | None = pb.GetPoolRequest(pool=pool, view=pb.POOL_VIEW_BLOCKS)
        pages = []
        while request is not None:
            pages.append(self._link.call(self._stub.GetPool, request, timeout_s))
            request = messages.next_page(request, pages[-1])
        return messages.pool_blocks(pages)

    def get_pool_usage(self, pool: str, *, timeout_s: float | None = None) -> views.PoolUsage:
        """Returns where the memory of one pool goes: namespaces, longest and most shared prefixes, fragmentation."""
        request = pb.GetPoolRequest(pool=pool, view=pb.POOL_VIEW_USAGE)
        return messages.pool_usage(self._link.call(self._stub.GetPool, request, timeout_s))

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
        self,
        pool: str,
        spec: types.PoolSpec,
        *,
        keep_alive: bool = True,
        request_id: str | None = None,
        timeout_s: float | None = None,
    ) -> UnarySession:
        """Takes ownership of an empty pool; a repeated `request_id` takes the same one again.

        Its lease is renewed in the background until it is closed; without `keep_alive` only by calls.
        """
        request = messages.open_request(pool, spec, request_id)
        reply = self._link.call(self._stub.OpenSession, request, timeout_s)
        return UnarySession(self._link, self._stub, pool, len(spec.groups), reply, keep_alive=keep_alive)

    def blocking_session(self, pool: str, spec: types.PoolSpec, *, window: int = WINDOW) -> BlockingSession:
        """Takes ownership of a pool over a stream, for engines with threads of their own; its `open`, or `with`,
        attaches: see `quire.blocking`. At most `window` steps (1 to 8) are unanswered at a time."""
        token, tls = self._credentials

        def connected() -> tuple[PoolSession, Callable[[], Awaitable[None]]]:
            client = AsyncAllocatorClient(self.address, token=token, tls=tls)
            return client.session(pool, spec, window=window), client.close

        return BlockingSession(connected)

    def engine(self, pool: str, spec: types.PoolSpec, *, ahead_tokens: int = AHEAD_TOKENS) -> Engine:
        """Returns an engine on a session stream of its own, in a thread of its own; `with` takes the pool: see
        docs/engine.md. Sequences are to have room for `ahead_tokens` beyond their next one, for outages of that
        length."""
        return self._engine(lambda client: client.engine(pool, spec, ahead_tokens=ahead_tokens))

    def unary_engine(self, pool: str, spec: types.PoolSpec) -> Engine:
        """Returns the same engine on unary calls, a call for each operation. Its pool does not outlive the
        allocator."""
        return self._engine(lambda client: client.unary_engine(pool, spec))

    def _engine(self, make: Callable[[AsyncAllocatorClient], AsyncEngine[Any]]) -> Engine:
        """Makes an engine on a client of its own, for asyncio, in the engine's thread."""
        token, tls = self._credentials

        def connected() -> tuple[AsyncEngine[Any], Callable[[], Awaitable[None]]]:
            client = AsyncAllocatorClient(self.address, token=token, tls=tls)
            return make(client), client.close

        return Engine(connected)
