# Generated from _async/call_session.py by scripts/unasync.py. Change that file, then run `make format`.
"""A session without a stream: each operation is a unary call."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from types import TracebackType
from typing import Self

from quire import types
from quire._keep_alive import KeptByThread, warn_unclosed
from quire._transport import messages
from quire._transport.channel import SyncLink
from quire.errors import QuireError, UnavailableError
from quire.protocol.features import check_served
from quire.protocol.outcomes import Result
from quire.v1 import allocator_pb2 as pb
from quire.v1 import allocator_pb2_grpc as pb_grpc


class CallSession:
    """Owns one pool without a stream; `with` takes it, and gives it back at the end.

    The allocator drops the pool after `lease_ms` without a call, which a thread of its own sees to by default. Each
    operation takes a `request_id`, a new one by default: repeated with the same id and content it returns the first
    answer and does nothing, as long as that is one of the last 1,024, and they are no more than 16 MiB.

    Made by `session(..., transport="calls")` of an allocator's client.

    Attributes:
        pool: its name.
        lease_ms: length of the lease, known once the session is open.
    """

    def __init__(
        self,
        link: SyncLink,
        pool: str,
        spec: types.PoolSpec,
        *,
        keep_alive: bool = True,
        request_id: str | None = None,
    ) -> None:
        self.pool = pool
        self.lease_ms = 0
        self._request = messages.open_request(pool, spec, request_id)
        self._group_count = len(spec.groups)
        self._link = link
        self._stub = pb_grpc.AllocatorServiceStub(link.channel)
        self._session_id: bytes | None = None
        self._is_closed = False
        self._keeps_alive = keep_alive
        self._kept: KeptByThread | None = None

    @property
    def session_id(self) -> bytes:
        """Returns by which id the allocator knows it.

        Raises:
            UnavailableError: it is not open.
        """
        if self._session_id is None:
            raise UnavailableError(f"the session of pool {self.pool} is not open: call `open`, or use a `with` block")
        return self._session_id

    def open(self, *, timeout_s: float | None = None) -> None:
        """Takes the pool, empty; tried again after an outage it takes the same one.

        Raises:
            AlreadyExistsError: POOL_OWNED, somebody else has it.
            FailedPreconditionError: VERSION, the allocator does not serve this protocol or a feature of the pool.
            QuireError: anything else that a call may meet.
        """
        opened = self._link.call(self._stub.OpenSession, self._request, timeout_s)
        check_served(self._request.spec.features, opened.features)
        self._session_id, self.lease_ms = opened.session_id, opened.lease_ms
        if self._keeps_alive and self._kept is None:
            self._kept = KeptByThread(self, opened.lease_ms)

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
        is_return: bool = False,
        request_id: str | None = None,
        timeout_s: float | None = None,
    ) -> types.Allocation:
        """Creates a sequence that shares what `digests` hit.

        It answers OK, NO_SPACE, EXISTS, ID_TOO_LOW, TOO_LONG, PASS_TOO_LONG (a shorter first chunk would fit),
        PENDING or QUOTA.

        Args:
            sequence_id: higher than every earlier one.
            token_count: tokens to hold, at least 1; it holds more where more of a longer prompt is shared.
            digests: of the prompt's blocks in order, as many as may be shared; one by one or concatenated.
            namespace: prefixes are shared inside it.
            prompt_token_count: length of the whole prompt, where `token_count` is only its first chunk: admitted
                only if all of it would fit, and the rest is kept free from later admissions.
            priority: for a sequence of one priority none of a higher one is ever named as a victim.
            defer_token_count: answer PENDING if others are computing at least so many tokens of its prefix; 0: never.
            is_return: a preempted request returns: its tokens are counted as returned, not as queried.
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
            is_return=is_return,
        )
        reply = self._link.call(self._stub.Allocate, request, timeout_s)
        return messages.allocation(reply, self._group_count)

    def grow(
        self, sequence_id: int, token_count: int, *, request_id: str | None = None, timeout_s: float | None = None
    ) -> types.Growth:
        """Makes room for `token_count` tokens of a live sequence: OK, NO_SPACE, NOT_FOUND, TOO_LONG, PASS_TOO_LONG
        (fewer at once would fit, after a commit) or QUOTA."""
        request = messages.grow_request(self.session_id, request_id, sequence_id, token_count)
        reply = self._link.call(self._stub.Grow, request, timeout_s)
        return messages.growth(reply, self._group_count)

    def fork(
        self,
        parent_id: int,
        child_id: int,
        *,
        request_id: str | None = None,
        timeout_s: float | None = None,
    ) -> Result:
        """Creates a sequence (ids only rise) that shares every computed block of a live one.

        OK, NOT_FOUND, EXISTS (a live one has the id), ID_TOO_LOW, or UNCOMMITTED: a pool with STATE groups, and a
        parent with granted tokens that are not committed.
        """
        request = messages.fork_request(self.session_id, request_id, parent_id, child_id)
        reply = self._link.call(self._stub.Fork, request, timeout_s)
        return Result(reply.result)

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
        """Notes that tokens up to `token_count` are computed: OK, NOT_FOUND or TOO_LONG.

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
        """Drops a sequence: OK or NOT_FOUND."""
        request = messages.free_request(self.session_id, request_id, sequence_id)
        reply = self._link.call(self._stub.Free, request, timeout_s)
        return Result(reply.result)

    def keep_alive(self, *, timeout_s: float | None = None) -> int:
        """Renews the lease and returns its length in milliseconds; every other call renews it too."""
        request = pb.KeepAliveRequest(session_id=self.session_id)
        reply = self._link.call(self._stub.KeepAlive, request, timeout_s)
        return reply.lease_ms

    def close(self, *, timeout_s: float | None = None) -> None:
        """Gives the pool back; closing twice is no error."""
        self._is_closed = True
        if self._session_id is None or self._link.is_inherited:  # never taken, or the parent's
            return
        if self._kept is not None:
            self._kept.stop()
        self._link.call(self._stub.CloseSession, pb.CloseSessionRequest(session_id=self.session_id), timeout_s)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of pool {self.pool} at {self._link.address}{', closed' * self._is_closed}>"

    def __del__(self) -> None:
        if getattr(self, "_session_id", None) is not None and not (self._is_closed or self._link.is_inherited):
            warn_unclosed(self)

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, error: BaseException | None, _traceback: TracebackType | None
    ) -> None:
        # What went wrong inside the block must not be hidden by a failure to close; the lease ends by itself.
        with contextlib.suppress(QuireError) if error is not None else contextlib.nullcontext():
            self.close()
