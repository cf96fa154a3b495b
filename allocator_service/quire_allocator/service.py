"""AllocatorService: thin handlers between the wire and the core.

Every handler checks its request, makes one domain call and translates. All run on one event loop, which is the only
writer: no handler awaits between reading and changing the state of a pool.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeAlias, TypeVar, cast

import grpc
import structlog
from google.protobuf.message import Message
from grpc import aio
from quire._serving.rpc import Authorize, abort, permit_everything
from quire.errors import QuireError, Reason
from quire.protocol.permissions import Permissions
from quire.v1 import allocator_pb2 as pb
from quire.v1 import allocator_pb2_grpc as pb_grpc

from quire_allocator import limits
from quire_allocator.core.ownership.directory import Directory, Ownership
from quire_allocator.core.refusal import Refusal
from quire_allocator.core.spec import DIGEST_BYTES, CommitResult, GrowResult, Result
from quire_allocator.metrics.counters import Counters
from quire_allocator.session.registry import SessionRegistry
from quire_allocator.session.stream import SessionStream
from quire_allocator.watch import Watching
from quire_allocator.wire import authorization, reply_size, step_apply, step_checks, translate, views
from quire_allocator.wire.translate import require

log = structlog.get_logger()
Context: TypeAlias = "aio.ServicerContext[Any, Any]"
RequestT = TypeVar("RequestT", bound=Message)
ResponseT = TypeVar("ResponseT", bound=Message)


def unary(
    handler: Callable[[AllocatorService, RequestT, Permissions], ResponseT],
) -> Callable[[AllocatorService, RequestT, Context], Awaitable[ResponseT]]:
    """Turns a plain function into a handler: it is told what the caller may do, refusals become errors with a reason,
    every call is counted."""

    @functools.wraps(handler)
    async def call(self: AllocatorService, request: RequestT, context: Context) -> ResponseT:
        try:
            response = handler(self, request, self.authorize(context))
        except Refusal as refusal:
            error = QuireError.of(Reason(refusal.reason), refusal.message, refusal.retry_after_s)
            self.counters.count_rpc(handler.__name__, error.code.name)
            if error.code is grpc.StatusCode.PERMISSION_DENIED:
                log.warning("call refused", method=handler.__name__, reason=error.reason, peer=context.peer())
            await abort(context, error)
        self.counters.count_rpc(handler.__name__, "OK")
        return response

    return call


class _Witness:
    """Tells logs, metrics and watchers what happens to pools; see `sessions.Observer`."""

    def __init__(self, counters: Counters, watching: Watching) -> None:
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
        if owner.unary:  # it is gone; a stream's is reported anew
            self._counters.forget(owner.name)
        self._watching.wake(owner.name)


class AllocatorService(pb_grpc.AllocatorServiceServicer):
    """Serves every attached pool of `directory`; `authorize` says what the caller of a call may do."""

    def __init__(
        self,
        directory: Directory,
        counters: Counters,
        *,
        check_invariants: bool = False,
        clock: Callable[[], float] = time.monotonic,
        authorize: Authorize = permit_everything,
    ) -> None:
        self.directory = directory
        self.authorize = authorize
        self.counters = counters
        self.clock = clock
        self.watching = Watching(directory)
        self.sessions = SessionRegistry(
            directory,
            _Witness(counters, self.watching),
            new_session_id=lambda: secrets.token_bytes(16),
            check_invariants=check_invariants,
        )
        counters.refused_pool_count = lambda: self.sessions.refused_pool_count(self.clock())

    # -- the owner's stream --------------------------------------------------------------------------------------------

    async def Session(  # type: ignore[override]  # replies go through context.write
        self, request_iterator: AsyncIterator[pb.SessionRequest], context: Context
    ) -> None:
        """See `stream.SessionStream`."""
        await SessionStream(self, context, self.authorize(context)).run()

    def drain(self) -> None:
        """Takes no new session and ends every stream with UNAVAILABLE / DRAINING."""
        self.watching.drain()
        self.sessions.drain()

    def expire_leases(self, until: float) -> None:
        """See `SessionRegistry.expire`; called by the server's timer."""
        self.sessions.expire(until)

    # -- unary sessions ------------------------------------------------------------------------------------------------

    @unary
    def OpenSession(self, request: pb.OpenSessionRequest, permissions: Permissions) -> pb.OpenSessionResponse:
        require(not self.sessions.draining, "the allocator is shutting down", "DRAINING")
        name = translate.pool_name(request.pool)
        authorization.require_owning(permissions, name)
        self.sessions.check_quarantine(name, self.clock())
        owner = self.directory.open_unary(
            name=name,
            spec=translate.pool_spec(request.spec),
            request_id=translate.request_id(request.request_id),
            session_id=self.sessions.new_session_id(),
            now=self.clock(),
        )
        self.sessions.observer.opened(owner)
        return pb.OpenSessionResponse(
            session_id=owner.session_id, lease_ms=int(self.directory.lease_s * 1000), limits=translate.LIMITS
        )

    @unary
    def KeepAlive(self, request: pb.KeepAliveRequest, permissions: Permissions) -> pb.KeepAliveResponse:
        self.directory.renew(self._owner(request.session_id, permissions), self.clock())
        return pb.KeepAliveResponse(lease_ms=int(self.directory.lease_s * 1000))

    @unary
    def Allocate(self, request: pb.AllocateRequest, permissions: Permissions) -> pb.AllocateResponse:
        digests = translate.digests(request.digests)
        namespace = translate.namespace(request.namespace)
        require(request.token_count > 0, "token_count must be at least 1")

        def operate(owner: Ownership) -> pb.AllocateResponse:
            require(len(owner.pool.sequences) < limits.SEQUENCES_MAX, "too many live sequences", "LIMIT")
            longest = max(request.token_count, request.prompt_token_count)
            reply_size.check(reply_size.grow_answer_bytes_max(owner.pool, request.sequence_id, longest))
            grown = owner.pool.allocate(
                request.sequence_id,
                request.token_count,
                digests,
                namespace,
                prompt_token_count=request.prompt_token_count,
                priority=request.priority,
                defer_token_count=request.defer_token_count,
            )
            return pb.AllocateResponse(
                result=_wire(grown.result),
                matched_token_count=grown.matched_token_count,
                pending_token_count=grown.pending_token_count,
                tables=map(translate.block_table, grown.blocks),
                copy_sources=(copy.source for copy in grown.copies),
                copy_destinations=(copy.destination for copy in grown.copies),
                shortfall=grown.shortfall,
                victim=translate.victim(grown.victim),
            )

        return self._once(request, permissions, "grow", operate)

    @unary
    def Grow(self, request: pb.GrowRequest, permissions: Permissions) -> pb.GrowResponse:
        require(request.token_count > 0, "token_count must be at least 1")

        def operate(owner: Ownership) -> pb.GrowResponse:
            reply_size.check(reply_size.grow_answer_bytes_max(owner.pool, request.sequence_id, request.token_count))
            grown: GrowResult = owner.pool.grow(request.sequence_id, request.token_count)
            return pb.GrowResponse(
                result=_wire(grown.result),
                tables=map(translate.block_table, grown.blocks),
                copy_sources=(copy.source for copy in grown.copies),
                copy_destinations=(copy.destination for copy in grown.copies),
                shortfall=grown.shortfall,
                victim=translate.victim(grown.victim),
            )

        return self._once(request, permissions, "grow", operate)

    @unary
    def Fork(self, request: pb.ForkRequest, permissions: Permissions) -> pb.ForkResponse:
        require(request.hold_ms <= limits.HOLD_MS_MAX, f"hold_ms is at most {limits.HOLD_MS_MAX}")
        hold_until = step_apply.hold_until(request.hold_ms, self.clock())

        def operate(owner: Ownership) -> pb.ForkResponse:
            require(len(owner.pool.sequences) < limits.SEQUENCES_MAX, "too many live sequences", "LIMIT")
            done = owner.pool.fork(request.parent_id, request.child_id, hold_until=hold_until)
            return pb.ForkResponse(result=_wire(done))

        return self._once(request, permissions, "fork", operate)

    @unary
    def Commit(self, request: pb.CommitRequest, permissions: Permissions) -> pb.CommitResponse:
        digests = translate.digests(request.digests)

        def operate(owner: Ownership) -> pb.CommitResponse:
            digest_count = len(digests) // DIGEST_BYTES
            step_checks.check_commit(owner.pool, request.sequence_id, request.token_count, digest_count)
            reply_size.check(reply_size.commit_answer_bytes_max(owner.pool, digest_count))
            done: CommitResult = owner.pool.commit(
                request.sequence_id, request.token_count, digests, request.keep_token_count
            )
            return pb.CommitResponse(
                result=_wire(done.result),
                swap_groups=(swap.group for swap in done.swaps),
                swap_indices=(swap.position for swap in done.swaps),
                swap_blocks=(swap.block for swap in done.swaps),
            )

        return self._once(request, permissions, "commit", operate)

    @unary
    def Free(self, request: pb.FreeRequest, permissions: Permissions) -> pb.FreeResponse:
        return self._once(
            request,
            permissions,
            "free",
            lambda owner: pb.FreeResponse(result=_wire(owner.pool.free(request.sequence_id))),
        )

    @unary
    def CloseSession(self, request: pb.CloseSessionRequest, permissions: Permissions) -> pb.CloseSessionResponse:
        try:
            owner = self._owner(request.session_id, permissions)
        except Refusal as refusal:
            if refusal.reason != "SESSION_UNKNOWN":
                raise
        else:
            self.sessions.drop(owner)
        return pb.CloseSessionResponse()

    # -- reading -------------------------------------------------------------------------------------------------------

    @unary
    def MatchPrefix(self, request: pb.MatchPrefixRequest, permissions: Permissions) -> pb.MatchPrefixResponse:
        digests, namespace = translate.digests(request.digests), translate.namespace(request.namespace)
        authorization.require_namespace(permissions, namespace)
        found = []
        for owner in self._observable(permissions):
            matched = owner.pool.match_acknowledged(namespace, digests)
            if matched:
                found.append(pb.PrefixMatch(pool=owner.name, matched_token_count=matched))
        return pb.MatchPrefixResponse(matches=sorted(found, key=lambda m: (-m.matched_token_count, m.pool)))

    @unary
    def ListPools(self, request: pb.ListPoolsRequest, permissions: Permissions) -> pb.ListPoolsResponse:
        now = self.clock()
        return pb.ListPoolsResponse(pools=[views.summary(owner, now) for owner in self._observable(permissions)])

    @unary
    def GetPool(self, request: pb.GetPoolRequest, permissions: Permissions) -> pb.GetPoolResponse:
        name = translate.pool_name(request.pool)
        authorization.require_observing(permissions, name)
        owner = self.directory.pool(name)
        response = pb.GetPoolResponse(summary=views.summary(owner, self.clock()))
        if request.view == pb.POOL_VIEW_BLOCKS:
            views.add_block_states(owner.pool, request, response)
            views.add_sequences(owner.pool, request, response, permissions)
        elif request.view == pb.POOL_VIEW_USAGE:
            views.add_usage(owner.pool, response, permissions)
        return response

    async def WatchEvents(  # type: ignore[override]  # events go through context.write
        self, request: pb.WatchEventsRequest, context: Context
    ) -> None:
        """See `watch.Watcher`."""
        code = "OK"
        try:
            require(not self.sessions.draining, "the allocator is shutting down", "DRAINING")
            await self.watching.serve(request, context, self.authorize(context))
        except Refusal as refusal:
            error = QuireError.of(Reason(refusal.reason), refusal.message, refusal.retry_after_s)
            code = error.code.name
            if error.code is grpc.StatusCode.PERMISSION_DENIED:
                log.warning("call refused", method="WatchEvents", reason=error.reason, peer=context.peer())
            await abort(context, error)
        except asyncio.CancelledError:
            code = "CANCELLED"
            raise
        finally:
            self.counters.count_rpc("WatchEvents", code)

    # -- shared --------------------------------------------------------------------------------------------------------

    def _observable(self, permissions: Permissions) -> list[Ownership]:
        """The open pools that a caller may know of, by name."""
        return [owner for owner in self.directory.open_pools() if permissions.may_observe(owner.name)]

    def _owner(self, session_id: bytes, permissions: Permissions) -> Ownership:
        """The unary session that a call names."""
        owner = self.directory.session(session_id)
        authorization.require_owning(permissions, owner.name)
        require(owner.unary, "this pool is owned over the Session stream", "FENCED")
        return owner

    def _once(
        self, request: Any, permissions: Permissions, operation: str, operate: Callable[[Ownership], ResponseT]
    ) -> ResponseT:
        """Applies an operation, or returns the answer that its request id had before. Only what is not refused renews
        the session's lease."""
        owner = self._owner(request.session_id, permissions)
        authorization.require_operation(permissions, owner.pool, request)
        request_id = translate.request_id(request.request_id)
        # With its type: requests of two types that carry equal numbers are equal bytes.
        content = type(request).__name__.encode() + request.SerializeToString(deterministic=True)
        sha256 = hashlib.sha256(content).digest()
        kept = owner.answers.replay(request_id, sha256)
        if kept is not None:
            self.directory.renew(owner, self.clock())
            return cast("ResponseT", kept)
        response = self.sessions.apply(owner, lambda: operate(owner), self.clock())
        self.directory.renew(owner, self.clock())
        self.sessions.publish(owner)
        owner.answers.record(request_id, sha256, response, size=response.ByteSize())
        self.counters.of(owner.name).count(operation, response.result)  # type: ignore[attr-defined]
        return response


def _wire(result: Result) -> pb.Result.ValueType:
    return cast("pb.Result.ValueType", int(result))
