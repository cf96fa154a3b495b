"""The sessions of one allocator, and their shared state: the directory, places for reports, quarantines, leases."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Hashable
from typing import Protocol, TypeVar, cast

from quire_allocator import limits
from quire_allocator.core.drop import CacheDrop, drop_cached
from quire_allocator.core.ownership.directory import Directory, Ownership
from quire_allocator.core.readers import invariants
from quire_allocator.core.refusal import Refusal
from quire_allocator.core.spec import DIGEST_BYTES
from quire_allocator.routing.router import Router
from quire_allocator.session.caller_memory import TRUSTED_BYTES, CallerMemory, pool_bytes
from quire_allocator.session.kept_bytes import KeptBytes

AnswerT = TypeVar("AnswerT")


class Stream(Protocol):
    """The interface of a stream to its registry; `SessionMachine` is one.

    Attributes:
        caller: the stream's caller. A caller gets a place for a report only while it has fewer places than are free.
    """

    caller: Hashable

    def end(self, reason: str, message: str) -> None:
        """Ends the stream: its next message is refused with this reason."""

    def check_report(self, now: float) -> None:
        """Ends the stream if it has a place for a report and has sent no chunk for too long."""


class Observer(Protocol):
    """Gets the events for logs, metrics and watchers; nothing here depends on its methods."""

    def opened(self, owner: Ownership) -> None:
        """A session began: a stream's report is in force, or a unary owner opened its pool."""

    def recovered(self, owner: Ownership, reported_block_count: int, asked: float) -> None:
        """A pool was made of a report of `reported_block_count` blocks that was requested at time `asked`. `opened` was
        called for this pool before."""

    def disagreed(self, owner: Ownership) -> None:
        """The owner gave up a session that still exists, and reports its pool again."""

    def resumed(self, owner: Ownership) -> None:
        """A session continues with a new stream."""

    def dropped(self, owner: Ownership) -> None:
        """A pool is gone: detached, closed, or its lease ended."""

    def expired(self, owner: Ownership) -> None:
        """A pool will now be dropped, because its owner was silent for a whole lease; `dropped` follows."""

    def published(self, owner: Ownership) -> None:
        """Events were published, which watchers of the pool may read now."""

    def quarantined(self, owner: Ownership, error: Exception) -> None:
        """An invariant of the pool broke; its session is over."""


class SessionRegistry:
    """Holds every stream and every pool of one allocator; every change of a pool goes through `apply`.

    Args:
        directory: pools, owners and leases.
        observer: gets the events.
        new_session_id: returns 16 bytes that were never a session id before.
        check_invariants: whether every change of a pool is followed by a full recount; slow, for debugging.
        memory_max: bytes that the pools of one caller may take, by estimate.

    Attributes:
        draining: whether the allocator is shutting down, and opens no session any more.
        kept_bytes: the bytes of steps and replies that sessions keep for replay.
        memory: bounds the memory of each caller's pools.
        router: chooses workers among the pools whose owners registered a worker.
        streams: every stream, those that have not attached yet included.
        staging: the streams that have a place for a report.
    """

    def __init__(
        self,
        directory: Directory,
        observer: Observer,
        *,
        new_session_id: Callable[[], bytes],
        check_invariants: bool = False,
        memory_max: int = limits.MEMORY_OF_CALLER_MAX,
    ) -> None:
        self.directory = directory
        self.observer = observer
        self.new_session_id = new_session_id
        self.check_invariants = check_invariants
        self.draining = False
        self.kept_bytes = KeptBytes(directory)
        self.memory = CallerMemory(directory, memory_max)
        self.router = Router()
        self.streams: set[Stream] = set()
        self.staging: set[Stream] = set()
        self._quarantines: defaultdict[str, deque[float]] = defaultdict(deque)  # time of each quarantine, by pool

    def drain(self) -> None:
        """Takes no new session and ends every stream with UNAVAILABLE / DRAINING."""
        self.draining = True
        for stream in list(self.streams):
            stream.end("DRAINING", "the allocator is shutting down")

    def apply(self, owner: Ownership, operate: Callable[[], AnswerT], now: float) -> AnswerT:
        """Changes a pool by a checked request, and returns the result of `operate`.

        An exception that is no refusal is a defect of the allocator: it stops this pool, and other pools continue.

        Raises:
            Refusal: POOL_QUARANTINED, and the refusals of `operate`, which raises only before it changes anything.
        """
        try:
            answer = operate()
            owner.change_count += 1
            if self.check_invariants:
                invariants.check(owner.pool)
            elif not owner.change_count % limits.CHANGES_PER_CHECK:
                owner.pool.blocks.check_counts()
        except Refusal:
            raise
        except Exception as error:
            self._quarantines[owner.name].append(now)
            self.directory.quarantine(owner)
            if owner.unary:
                self.router.forget(owner.name)
            self.observer.quarantined(owner, error)
            raise Refusal(
                "POOL_QUARANTINED",
                f"an invariant of pool {owner.name} broke because of a bug in the allocator; attach again",
            ) from error
        return answer

    def check_sequences(self, owner: Ownership, count: int) -> None:
        """Checks that a pool may have `count` live sequences beside those in its caller's other pools.

        Raises:
            Refusal: LIMIT.
        """
        if count > limits.SEQUENCES_UNSHARED:
            pools = [each for each in self.directory.open_pools() if each.caller == owner.caller and each is not owner]
            total, most = count + sum(len(each.pool.sequences) for each in pools), limits.SEQUENCES_OF_CALLER_MAX
            if total > most:
                text = f"all pools of one caller may have {most:,} live sequences, not {total:,}: free some"
                raise Refusal("LIMIT", text)

    def make_room(self, owner: Ownership, added: int, now: float) -> None:
        """Lets a pool take `added` more bytes of memory. If its caller's pools take too much, evicts from this pool.

        Raises:
            Refusal: LIMIT, POOL_QUARANTINED.
        """
        if owner.allowed_bytes < TRUSTED_BYTES and pool_bytes(owner.pool) + added > owner.allowed_bytes:
            owner.pool.log.step = owner.steps.next_step
            self.apply(owner, lambda: self.memory.evict(owner, added), now)
            self.memory.allow(owner, added)

    def drop_cache(self, owner: Ownership, drop: CacheDrop, now: float) -> int:
        """Drops cached blocks of a pool for a caller other than its owner. The owner learns of the drop with its next
        step. Returns how many blocks were dropped.

        Raises:
            Refusal: LIMIT if many earlier drops are not reported to the owner yet; POOL_QUARANTINED.
        """
        if drop not in owner.untold_drops:
            drops = [*owner.untold_drops, drop]
            digests = sum([len(untold.digests) // DIGEST_BYTES for untold in drops])
            if len(drops) > limits.DROPS_UNTOLD_MAX or digests > limits.DROPS_UNTOLD_DIGESTS_MAX:
                text = (
                    f"the owner of pool {owner.name} must first learn of {len(drops) - 1} other drops, with its "
                    "next step"
                )
                raise Refusal("LIMIT", f"{text}: try again after that step")
            owner.untold_drops = drops
        return self.apply_drop(owner, drop, now)

    def apply_drop(self, owner: Ownership, drop: CacheDrop, now: float) -> int:
        """Drops cached blocks, as a part of the owner's next step."""
        owner.pool.log.step = owner.steps.next_step
        return self.apply(owner, lambda: drop_cached(owner.pool, *drop), now)

    def check_quarantine(self, name: str, now: float) -> None:
        """Refuses a pool that broke `QUARANTINES_MAX` times in `QUARANTINE_WINDOW_S` seconds.

        Raises:
            Refusal: POOL_QUARANTINED.
        """
        recent = self._recent_quarantines(name, now)
        if len(recent) >= limits.QUARANTINES_MAX:
            raise Refusal(
                "POOL_QUARANTINED",
                f"pool {name} broke {len(recent)} times in {limits.QUARANTINE_WINDOW_S:g} s and cannot be "
                "attached for now",
                retry_after_s=recent[-limits.QUARANTINES_MAX] + limits.QUARANTINE_WINDOW_S - now,
            )

    def refused_pool_count(self, now: float) -> int:
        """Counts the pools that broke so often that they cannot be attached for now."""
        names = list(self._quarantines)  # a copy, because another thread reads the metrics
        return sum(len(self._recent_quarantines(name, now)) >= limits.QUARANTINES_MAX for name in names)

    def _recent_quarantines(self, name: str, now: float) -> list[float]:
        times = list(self._quarantines.get(name, ()))
        return [time for time in times if time > now - limits.QUARANTINE_WINDOW_S]

    def drop(self, owner: Ownership) -> None:
        """Drops a pool: its owner detached or closed it, or its lease ended."""
        self.directory.remove(owner)
        self.router.forget(owner.name)
        self.memory.end_report(owner)
        self.memory.share_event_logs(owner.caller)
        self.observer.dropped(owner)

    def publish(self, owner: Ownership, acknowledged: int) -> None:
        """Shows watchers the changes of steps up to number `acknowledged`. For a unary session, shows the changes of
        every step: such a pool is lost with the allocator, so no later report can miss them."""
        if owner.pool.log.publish(owner.steps.next_step if owner.unary else acknowledged):
            self.observer.published(owner)

    def expire(self, now: float) -> None:
        """Drops pools with expired leases, and reservations whose time has ended."""
        self.router.expire(now)
        for stream in list(self.staging):
            stream.check_report(now)
        for owner in self.directory.expire(now):
            self.observer.expired(owner)
            self.drop(owner)
            if owner.stream is not None:
                cast("Stream", owner.stream).end(
                    "IDLE", f"the owner sent no message for its lease of {self.directory.lease_s:g} s"
                )
        for name in list(self._quarantines):
            if self._quarantines[name][-1] <= now - limits.QUARANTINE_WINDOW_S:
                del self._quarantines[name]
