"""The owner of each pool: attach, fence, resume, leases.

Lifecycle of an ownership:

    1. claimed       `attach` was accepted; the owner has still to report its pool
    2. open          `open` put a pool and a session id in place; steps are applied
    3. disconnected  its stream ended without a detach: the state stays until the lease ends, for a resume
    4. gone          `remove` or `expire`; only then another incarnation may attach

Fencing: at any time, a pool has one current stream. A newer attach of the same incarnation replaces it, and the caller
ends the old stream. A lease only cleans up. A claim locks out no process: owners guard their own memory.

Times are seconds of a monotonic clock, session ids come from the caller.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace

from quire_allocator.core.blocks import KEPT_SHARE
from quire_allocator.core.drop import CacheDrop
from quire_allocator.core.ownership.replay import StepLog
from quire_allocator.core.pool import Pool
from quire_allocator.core.readers import invariants
from quire_allocator.core.refusal import Refusal
from quire_allocator.core.spec import PoolSpec

OWNED_RETRY_S_MIN, OWNED_RETRY_S_MAX = 0.05, 1.0
BLOCKS_OF_CALLER_MAX = 1 << 25  # twice as many for all callers together; an empty block takes 4 bytes


@dataclass(slots=True)
class Ownership:
    """One pool and its owner.

    Attributes:
        stream: handle of the current stream; None for unary sessions and while disconnected.
        pool: the pool; while only claimed, a pool without blocks, because `attach` takes no memory.
        caller: the key under which its pools and blocks are counted.
        session_id: 16 bytes; empty while only claimed, and after quarantine.
        steps: the kept replies to the session's steps.
        change_count: number of applied steps.
        untold_drops: drops by other callers since the owner's last step.
        allowed_bytes: estimated memory that the pool may reach before all pools of its caller are summed again.
    """

    name: str
    spec: PoolSpec
    incarnation: bytes
    epoch: int
    window: int
    lease_end: float
    stream: object | None
    unary: bool
    pool: Pool
    caller: Hashable = None
    session_id: bytes = b""
    steps: StepLog = field(default_factory=lambda: StepLog(1, 1))
    change_count: int = 0
    untold_drops: list[CacheDrop] = field(default_factory=list)
    allowed_bytes: int = 0


class Directory:
    """Every pool that is attached to this allocator.

    Args:
        lease_s: the longest silence of an owner, in seconds.
        kept_share: share of each pool that the callers of one namespace may ask to keep.
        pools_max, blocks_max: one caller's maximum while no other caller has any. All callers together may have twice
            as many, and each caller may have at most half of what the others leave.
    """

    def __init__(
        self, *, lease_s: float, pools_max: int, blocks_max: int = BLOCKS_OF_CALLER_MAX, kept_share: float = KEPT_SHARE
    ) -> None:
        self._kept_share = kept_share
        self.lease_s = lease_s
        self.pools_max = pools_max
        self.blocks_max = blocks_max
        self.expired_count = 0
        self._owners: dict[str, Ownership] = {}
        self._sessions: dict[bytes, Ownership] = {}

    def attach(
        self,
        *,
        name: str,
        spec: PoolSpec,
        incarnation: bytes,
        epoch: int,
        window: int,
        resume_session: bytes,
        stream: object,
        now: float,
        caller: Hashable = None,
    ) -> tuple[Ownership, bool, object | None]:
        """Makes `stream` the pool's current one.

        Returns:
            The ownership, whether it was resumed (else a report is required), and the older stream to end, if any.

        Raises:
            Refusal: FENCED if the epoch was seen before; POOL_OWNED if another owner has not expired; LAYOUT if the
                specification differs from the session to resume; LIMIT for too many pools or blocks.
        """
        owner = self._owners.get(name)
        if owner is None or owner.unary or owner.incarnation != incarnation:
            self._admit(name, spec, caller, now)
            none = Pool(replace(spec, block_count=0))
            lease_end = now + self.lease_s
            owner = Ownership(name, spec, incarnation, epoch, window, lease_end, stream, False, none, caller)
            self._owners[name] = owner
            return owner, False, None
        if epoch <= owner.epoch:
            raise Refusal(
                "FENCED",
                f"pool {name}: epoch {epoch} must be above {owner.epoch}, the epoch of a newer stream of its owner",
            )
        resumed = bool(owner.session_id) and resume_session == owner.session_id
        if resumed and spec != owner.spec:
            raise Refusal(
                "LAYOUT", f"pool {name}: repeat the specification of the resumed session, or begin a new session"
            )
        older, owner.stream = owner.stream, stream
        owner.epoch, owner.window, owner.lease_end = epoch, window, now + self.lease_s
        if resumed:
            owner.steps.window = window
        return owner, resumed, older

    def open(
        self,
        owner: Ownership,
        *,
        spec: PoolSpec,
        session_id: bytes,
        last_step: int,
        make_pool: Callable[[PoolSpec], Pool] = Pool,
    ) -> None:
        """Puts a new pool in force under a new session id, after a report. Until then the old pool stays.

        Raises:
            Refusal: LIMIT if a specification larger than the earlier one asks for too many blocks. Refusals of
                `make_pool` pass through.
        """
        self.check_blocks(owner.name, spec, owner.caller)
        pool = make_pool(spec)
        pool.blocks.kept_block_count_max = int(self._kept_share * spec.block_count)
        self._sessions.pop(owner.session_id, None)
        owner.spec = spec
        owner.pool = pool
        owner.session_id = session_id
        owner.steps = StepLog(last_step + 1, owner.window)
        self._sessions[session_id] = owner

    def open_unary(
        self, *, name: str, spec: PoolSpec, request_id: str, session_id: bytes, now: float, caller: Hashable = None
    ) -> Ownership:
        """Takes a pool for a unary session; a repeated `request_id` returns the session that it opened.

        Raises:
            Refusal: POOL_OWNED, LIMIT; LAYOUT if the repeated request names another specification.
        """
        owner = self._owners.get(name)
        if owner is not None and owner.unary and owner.incarnation == request_id.encode():
            if owner.spec != spec:
                raise Refusal(
                    "LAYOUT", f"pool {name}: request_id {request_id} was used with another specification; use a new one"
                )
            self.renew(owner, now)
            return owner
        self._admit(name, spec, caller, now)
        lease_end = now + self.lease_s
        pool, incarnation = Pool(spec), request_id.encode()
        pool.blocks.kept_block_count_max = int(self._kept_share * spec.block_count)
        owner = Ownership(name, spec, incarnation, 1, 1, lease_end, None, True, pool, caller, session_id=session_id)
        self._owners[name] = owner
        self._sessions[session_id] = owner
        return owner

    def session(self, session_id: bytes) -> Ownership:
        """Returns the open session with this id, or raises the refusal SESSION_UNKNOWN."""
        owner = self.find_session(session_id)
        if owner is None:
            raise Refusal("SESSION_UNKNOWN", "the session expired, was closed or never existed; attach again")
        return owner

    def find_session(self, session_id: bytes) -> Ownership | None:
        """Returns the open session with this id, or None."""
        return self._sessions.get(session_id)

    def pool(self, name: str) -> Ownership:
        """Returns the open pool with this name, or raises the refusal POOL_UNKNOWN."""
        owner = self._owners.get(name)
        if owner is None or not owner.session_id:
            raise Refusal("POOL_UNKNOWN", f"no pool named {name!r} is attached")
        return owner

    def open_pools(self) -> list[Ownership]:
        """Returns every open pool, by name."""
        return [owner for _, owner in sorted(self._owners.items()) if owner.session_id]

    def renew(self, owner: Ownership, now: float) -> None:
        """Renews the lease, because a message of the owner arrived."""
        owner.lease_end = now + self.lease_s

    def disconnect(self, owner: Ownership, stream: object) -> None:
        """Notes that a stream ended; if it was the current one, the lease runs from the last message."""
        if owner.stream is stream:
            owner.stream = None

    def remove(self, owner: Ownership) -> None:
        """Drops a pool: its owner detached or its session was closed."""
        if self._owners.get(owner.name) is owner:
            del self._owners[owner.name]
        self._sessions.pop(owner.session_id, None)

    def quarantine(self, owner: Ownership) -> None:
        """Ends the session after a broken invariant. The owner must attach and report, or open, again."""
        if owner.unary:
            self.remove(owner)
            return
        self._sessions.pop(owner.session_id, None)
        owner.session_id = b""

    def expire(self, now: float) -> list[Ownership]:
        """Drops every pool with an expired lease, and returns these pools, so that the caller can end their streams."""
        gone = [owner for owner in self._owners.values() if owner.lease_end <= now]
        for owner in gone:
            self.remove(owner)
        self.expired_count += len(gone)
        return gone

    def extend_leases(self, stalled_s: float) -> None:
        """Extends every lease by the seconds that the server itself stalled, when it could hear no owner."""
        for owner in self._owners.values():
            owner.lease_end += stalled_s

    def _admit(self, name: str, spec: PoolSpec, caller: Hashable, now: float) -> None:
        # A lease that has run out still counts here. Only `expire` ends leases: before each call, the server extends
        # all leases by its own stalls, and after the call it ends the old streams.
        owner = self._owners.get(name)
        if owner is not None:
            wait_s = max(0.0, owner.lease_end - now)
            message = f"pool {name} has another owner; its lease ends in {int(wait_s * 1000)} ms"
            # The owner may detach before its lease ends: a waiting caller retries each second, and when the lease ends.
            raise Refusal("POOL_OWNED", message, max(OWNED_RETRY_S_MIN, min(wait_s, OWNED_RETRY_S_MAX)))
        own_count = sum(each.caller == caller for each in self._owners.values())
        if own_count + len(self._owners) >= 2 * self.pools_max:
            text = f"one caller may have at most {self.pools_max} pools, fewer if others have many; it has {own_count}"
            raise Refusal("LIMIT", text)
        self.check_blocks(name, spec, caller)

    def check_blocks(self, name: str, spec: PoolSpec, caller: Hashable) -> None:
        """Raises the refusal LIMIT unless the caller may have a pool of this specification."""
        others = [owner for owner in self._owners.values() if owner.name != name]
        taken = sum(owner.spec.block_count for owner in others)
        own = sum(owner.spec.block_count for owner in others if owner.caller == caller)
        left = max(0, (2 * self.blocks_max - taken - own) // 2)
        if spec.block_count > left:
            text = f"{spec.block_count:,} blocks are too many: all pools of one caller may have {self.blocks_max:,}"
            raise Refusal("LIMIT", f"{text}, fewer if others have many; {left} are left")

    def check_invariants(self) -> None:
        """Checks that names and sessions agree, and that every pool is consistent.

        Raises:
            AssertionError: with the broken invariant in its message.
        """
        for name, owner in self._owners.items():
            assert owner.name == name, f"pool {owner.name} is listed under the name {name}"
            if owner.session_id:
                assert self._sessions.get(owner.session_id) is owner, f"pool {name} has no entry for its session"
                invariants.check(owner.pool)
        for session_id, owner in self._sessions.items():
            assert owner.session_id == session_id, f"pool {owner.name} is listed under an old session id"
            assert self._owners.get(owner.name) is owner, f"a session outlived pool {owner.name}"
