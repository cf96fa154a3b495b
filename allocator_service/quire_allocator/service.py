"""AllocatorService: thin handlers between the wire and the core.

Every handler checks its request, makes one domain call and translates the answer. All handlers run on one event loop,
which is the only writer of pools: no handler awaits between reading and changing the state of a pool.
"""

from __future__ import annotations

import asyncio
import functools
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final, TypeAlias, TypeVar

import grpc
import structlog
from google.protobuf.message import Message
from grpc import aio
from quire import __version__
from quire._serving.rpc import Authorize, abort, log_refused, permit_everything
from quire.errors import QuireError, Reason
from quire.protocol.features import FEATURES, ROUTE
from quire.protocol.limits import PROTOCOL_VERSION
from quire.protocol.permissions import Permissions
from quire.v1 import _packed_pb2 as packed
from quire.v1 import allocator_pb2 as pb
from quire.v1 import allocator_pb2_grpc as pb_grpc
from quire.v1 import server_pb2

from quire_allocator import limits
from quire_allocator.core import pool
from quire_allocator.core.ownership.directory import Directory, Ownership
from quire_allocator.core.readers import index, usage
from quire_allocator.core.refusal import Refusal
from quire_allocator.metrics.counters import Counters
from quire_allocator.session.registry import SessionRegistry
from quire_allocator.session.stream import SessionStream, Streams
from quire_allocator.session.unary import UnarySessions
from quire_allocator.watch import Watching
from quire_allocator.wire import authorization, routes, translate, views
from quire_allocator.wire.translate import require

log = structlog.get_logger()

# Whether the core runs compiled or as Python; `GetServerInfo` and the metrics report this.
CORE: Final = "python" if str(pool.__file__).endswith(".py") else "compiled"
Context: TypeAlias = "aio.ServicerContext[Any, Any]"
RequestT = TypeVar("RequestT", bound=Message)
ResponseT = TypeVar("ResponseT", bound=Message)


def unary(
    handler: Callable[[AllocatorService, RequestT, Permissions], ResponseT],
) -> Callable[[AllocatorService, RequestT, Context], Awaitable[ResponseT]]:
    """Turns a plain function into a handler: the function gets the caller's permissions, its refusals become errors
    with a reason, and every call is counted."""

    @functools.wraps(handler)
    async def call(self: AllocatorService, request: RequestT, context: Context) -> ResponseT:
        try:
            response = handler(self, request, self.authorize(context))
        except Refusal as refusal:
            error = _error(refusal, handler.__name__, context)
            self.counters.count_rpc(handler.__name__, error.code.name)
            await abort(context, error)
        self.counters.count_rpc(handler.__name__, "OK")
        return response

    return call


def _error(refusal: Refusal, method: str, context: Context) -> QuireError:
    """Returns the error of a refusal for its caller. The log names callers that lack a permission."""
    error = QuireError.of(Reason(refusal.reason), refusal.message, refusal.retry_after_s, field=refusal.field)
    if error.code is grpc.StatusCode.PERMISSION_DENIED:
        log_refused(method, error.reason, context.peer())
    return error


class _Witness:
    """Writes the events of pools to logs, metrics and watchers: the `Observer` of `session/registry.py`."""

    def __init__(self, counters: Counters, watching: Watching, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._counters = counters
        self._watching = watching

    def opened(self, owner: Ownership) -> None:
        kind = "unary" if owner.unary else "stream"
        log.info(
            "session opened",
            pool=owner.name,
            kind=kind,
            blocks=owner.spec.block_count,
            sequences=len(owner.pool.sequences),
            next_step=owner.steps.next_step,
        )
        self._watching.wake(owner.name)

    def recovered(self, owner: Ownership, reported_block_count: int, asked: float) -> None:
        seconds = self._clock() - asked
        blocks = owner.pool.blocks.used_count
        log.info(
            "pool recovered", pool=owner.name, reported_blocks=reported_block_count, blocks=blocks, seconds=seconds
        )
        self._counters.of(owner.name).observe_recovery(owner.pool, reported_block_count, seconds)

    def disagreed(self, owner: Ownership) -> None:
        log.warning("an owner's tables differ from the allocator's, so it reports its pool again", pool=owner.name)
        self._counters.of(owner.name).disagreement_count += 1

    def resumed(self, owner: Ownership) -> None:
        log.info("session resumed", pool=owner.name, next_step=owner.steps.next_step)

    def dropped(self, owner: Ownership) -> None:
        log.info("pool detached", pool=owner.name)
        self._counters.forget(owner.name)
        self._watching.wake(owner.name)

    def expired(self, owner: Ownership) -> None:
        log.warning("lease expired", pool=owner.name, sequences=len(owner.pool.sequences))

    def published(self, owner: Ownership) -> None:
        self._watching.wake(owner.name)

    def quarantined(self, owner: Ownership, error: Exception) -> None:
        log.error("pool quarantined", pool=owner.name, exc_info=error)
        self._counters.quarantine_count += 1
        if owner.unary:  # the pool ended with its session; the owner of a stream reports its pool again
            self._counters.forget(owner.name)
        self._watching.wake(owner.name)


class AllocatorService(pb_grpc.AllocatorServiceServicer):
    """Serves every attached pool of a directory.

    Args:
        directory: the pools.
        counters: counts of calls and pools for metrics.
        check_invariants: whether every change of a pool is followed by a full recount; slow, for debugging.
        clock: returns seconds that never decrease.
        authorize: returns the permissions of a call's caller.
        streams_max: streams that one caller may hold.
        memory_max: bytes that the pools of one caller may take, by estimate.
    """

    def __init__(
        self,
        directory: Directory,
        counters: Counters,
        *,
        check_invariants: bool = False,
        clock: Callable[[], float] = time.monotonic,
        authorize: Authorize = permit_everything,
        streams_max: int = limits.STREAMS_MAX,
        memory_max: int = limits.MEMORY_OF_CALLER_MAX,
    ) -> None:
        self.directory = directory
        self.authorize = authorize
        self.counters = counters
        self.clock = clock
        self.watching = Watching(directory)
        self.sessions = SessionRegistry(
            directory,
            _Witness(counters, self.watching, clock),
            new_session_id=lambda: secrets.token_bytes(16),
            check_invariants=check_invariants,
            memory_max=memory_max,
        )
        self.streams = Streams(self.sessions, counters, clock, streams_max)
        self.unary_sessions = UnarySessions(self.sessions, counters)
        counters.routes = self.sessions.router.counts
        counters.refused_pool_count = lambda: self.sessions.refused_pool_count(self.clock())

    # -- the owner's stream --------------------------------------------------------------------------------------------

    async def Session(  # type: ignore[override]  # replies go through context.write
        self, request_iterator: AsyncIterator[packed.SessionRequest], context: Context
    ) -> None:
        await SessionStream(self.streams, context, self.authorize(context)).run()

    def drain(self) -> None:
        """Takes no new session and ends every stream with UNAVAILABLE / DRAINING."""
        self.watching.drain()
        self.sessions.drain()

    def expire_leases(self, until: float) -> None:
        """Ends leases that were over at `until`, a time of the clock; the server's timer calls it."""
        self.sessions.expire(until)

    # -- unary sessions ------------------------------------------------------------------------------------------------

    @unary
    def OpenSession(self, request: pb.OpenSessionRequest, permissions: Permissions) -> pb.OpenSessionResponse:
        owner = self.unary_sessions.open(request, permissions, self.clock())
        return pb.OpenSessionResponse(
            session_id=owner.session_id,
            next_step=owner.steps.next_step,
            last_sequence_id=owner.pool.last_sequence_id,
            lease_ms=int(self.directory.lease_s * 1000),
            limits=translate.LIMITS,
            features=FEATURES,
        )

    @unary
    def Apply(self, step: packed.Step, permissions: Permissions) -> packed.StepReply:  # type: ignore[override]
        return self.unary_sessions.apply(step, permissions, self.clock())

    @unary
    def CloseSession(self, request: pb.CloseSessionRequest, permissions: Permissions) -> pb.CloseSessionResponse:
        self.unary_sessions.close(request.session_id, permissions)
        return pb.CloseSessionResponse()

    @unary
    def DropCache(self, request: pb.DropCacheRequest, permissions: Permissions) -> pb.DropCacheResponse:
        name, drop = translate.pool_name(request.pool), translate.cache_drop(request.drop)
        authorization.require_owning(permissions, name)
        authorization.require_drop(permissions, drop)
        owner = self.directory.pool(name)
        dropped = self.sessions.drop_cache(owner, drop, self.clock())
        log.info("cache dropped", pool=name, blocks=dropped, is_all=drop.namespace is None)
        held = usage.held_count(owner.pool, drop.namespace)
        return pb.DropCacheResponse(dropped_block_count=dropped, held_block_count=held)

    def _summary(self, owner: Ownership) -> pb.PoolSummary:
        return views.summary(owner, self.clock(), self.sessions.router.worker(owner.name))

    # -- reading -------------------------------------------------------------------------------------------------------

    @unary
    def MatchPrefix(self, request: pb.MatchPrefixRequest, permissions: Permissions) -> pb.MatchPrefixResponse:
        digests, namespace = translate.digests(request.digests), translate.namespace(request.namespace)
        authorization.require_namespace(permissions, namespace)
        found = []
        for owner in self._observable(permissions):
            matched, junction = index.find_acknowledged(owner.pool, namespace, digests)
            if matched or junction:
                found.append(
                    pb.PrefixMatch(pool=owner.name, matched_token_count=matched, attended_token_count=junction)
                )
        found.sort(key=lambda match: (-match.matched_token_count, -match.attended_token_count, match.pool))
        return pb.MatchPrefixResponse(matches=found)

    @unary
    def Route(self, request: pb.RouteRequest, permissions: Permissions) -> pb.RouteResponse:
        prompt = routes.prompt(request, permissions)
        authorization.require_namespace(permissions, prompt.namespace)
        return routes.response(self.sessions.router.route(self._observable(permissions), prompt, self.clock()))

    @unary
    def ListPools(self, request: pb.ListPoolsRequest, permissions: Permissions) -> pb.ListPoolsResponse:
        return views.pool_page(self._observable(permissions), request, self._summary)

    @unary
    def GetPool(self, request: pb.GetPoolRequest, permissions: Permissions) -> pb.GetPoolResponse:
        owner = self._observed(request.pool, permissions)
        views.refuse_old_views(request)
        return pb.GetPoolResponse(summary=self._summary(owner))

    @unary
    def GetPoolBlocks(self, request: pb.GetPoolBlocksRequest, permissions: Permissions) -> pb.GetPoolBlocksResponse:
        owner = self._observed(request.pool, permissions)
        response = pb.GetPoolBlocksResponse(summary=self._summary(owner))
        views.add_blocks(owner.pool, request, response, permissions)
        return response

    @unary
    def GetPoolUsage(self, request: pb.GetPoolUsageRequest, permissions: Permissions) -> pb.GetPoolUsageResponse:
        owner = self._observed(request.pool, permissions)
        response = pb.GetPoolUsageResponse(summary=self._summary(owner))
        views.add_usage(owner.pool, response, permissions)
        return response

    @unary
    def GetServerInfo(
        self, request: server_pb2.GetServerInfoRequest, permissions: Permissions
    ) -> server_pb2.GetServerInfoResponse:
        return server_pb2.GetServerInfoResponse(
            version=__version__,
            protocol_version=PROTOCOL_VERSION,
            features=(*FEATURES, ROUTE),
            limits=translate.LIMITS,
            core=CORE,
        )

    async def WatchEvents(  # type: ignore[override]  # events go through context.write
        self, request: pb.WatchEventsRequest, context: Context
    ) -> None:
        code = "OK"
        try:
            require(not self.sessions.draining, "the allocator is shutting down", "DRAINING")
            await self.watching.serve(request, context, self.authorize(context))
        except Refusal as refusal:
            error = _error(refusal, "WatchEvents", context)
            code = error.code.name
            await abort(context, error)
        except asyncio.CancelledError:
            code = "CANCELLED"
            raise
        finally:
            self.counters.count_rpc("WatchEvents", code)

    # -- shared --------------------------------------------------------------------------------------------------------

    def _observed(self, pool: str, permissions: Permissions) -> Ownership:
        """Returns the open pool with this name, if the caller may observe it.

        Raises:
            Refusal: MALFORMED, POOL_FORBIDDEN, POOL_UNKNOWN.
        """
        name = translate.pool_name(pool)
        authorization.require_observing(permissions, name)
        return self.directory.pool(name)

    def _observable(self, permissions: Permissions) -> list[Ownership]:
        """Returns the open pools that a caller may observe, by name."""
        return [owner for owner in self.directory.open_pools() if permissions.may_observe(owner.name)]


def add_to_server(service: AllocatorService, server: aio.Server) -> None:
    """Adds the service to a server. `Session` and `Apply` have messages with columns of bytes, and `Session`
    parses and serializes them itself, because it needs their sizes."""
    session = grpc.stream_stream_rpc_method_handler(service.Session)
    apply = grpc.unary_unary_rpc_method_handler(
        service.Apply, packed.Step.FromString, packed.StepReply.SerializeToString
    )
    handlers = {"Session": session, "Apply": apply}
    name = pb.DESCRIPTOR.services_by_name["AllocatorService"].full_name
    # gRPC serves a method with its first generic handler. If the method also has registered handlers, gRPC serves it
    # with the last of these. So the handlers with packed messages are added first as generic, and last as registered.
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(name, handlers),))
    pb_grpc.add_AllocatorServiceServicer_to_server(service, server)
    server.add_registered_method_handlers(name, handlers)  # type: ignore[attr-defined]  # grpc's stubs are older
