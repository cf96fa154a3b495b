"""What all sessions of one allocator share: the directory, places for reports, quarantines, leases."""

from __future__ import annotations

import contextlib
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Protocol, TypeVar, cast

from quire_allocator import limits
from quire_allocator.core.ownership.directory import Directory, Ownership
from quire_allocator.core.refusal import Refusal

AnswerT = TypeVar("AnswerT")


class Stream(Protocol):
    """What is asked of a stream from outside; see `machine.SessionMachine`."""

    def end(self, reason: str, message: str) -> None:
        """Ends it."""

    def check_report(self, now: float) -> None:
        """Ends it if it keeps a place for a report and sends none."""


class Observer(Protocol):
    """Who is told what happens; nothing here depends on it."""

    def opened(self, owner: Ownership) -> None:
        """A pool has a new session."""

    def resumed(self, owner: Ownership) -> None:
        """A session goes on with a new stream."""

    def dropped(self, owner: Ownership) -> None:
        """A pool is gone: detached, closed, or its lease ended."""

    def expired(self, owner: Ownership) -> None:
        """It was dropped because nobody was heard for the length of a lease; comes before `dropped`."""

    def published(self, owner: Ownership) -> None:
        """There is news for who watches the pool."""

    def quarantined(self, owner: Ownership, error: Exception) -> None:
        """An invariant of the pool broke."""


class SessionRegistry:
    """Every stream and every pool of one allocator."""

    def __init__(
        self,
        directory: Directory,
        observer: Observer,
        *,
        new_session_id: Callable[[], bytes],
        check_invariants: bool = False,
    ) -> None:
        self.directory = directory
        self.observer = observer
        self.new_session_id = new_session_id
        self.check_invariants = check_invariants
        self.draining = False
        self.streams: set[Stream] = set()  # every one, attached or not yet
        self.staging: set[Stream] = set()  # those that have a place for a report
        self._quarantines: defaultdict[str, deque[float]] = defaultdict(deque)

    def drain(self) -> None:
        """Takes no new session and ends every stream with UNAVAILABLE / DRAINING."""
        self.draining = True
        for stream in list(self.streams):
            stream.end("DRAINING", "the allocator is shutting down")

    def apply(self, owner: Ownership, operate: Callable[[], AnswerT], now: float) -> AnswerT:
        """Changes a pool by a checked request. A defect of ours stops this pool, and the others go on.

        Raises:
            Refusal: POOL_QUARANTINED; any that `operate` raises before it changes something.
        """
        try:
            answer = operate()
            owner.change_count += 1
            if self.check_invariants:
                owner.pool.check_invariants()
            elif not owner.change_count % limits.CHANGES_PER_CHECK:
                owner.pool.blocks.check_counts()
        except Refusal:
            raise
        except Exception as error:
            self._quarantines[owner.name].append(now)
            self.directory.quarantine(owner)
            self.observer.quarantined(owner, error)
            raise Refusal("POOL_QUARANTINED", "an invariant of this pool broke; attach again") from error
        return answer

    def _expire_holds(self, owner: Ownership, now: float) -> None:
        pool = owner.pool
        with contextlib.suppress(Refusal):  # quarantined: its owner is told when it asks for something
            if self.apply(owner, lambda: pool.expire_holds(now), now):
                self.publish(owner)

    def check_quarantine(self, name: str, now: float) -> None:
        """A pool that broke again and again is not built up once more.

        Raises:
            Refusal: POOL_QUARANTINED.
        """
        recent = self._recent_quarantines(name, now)
        if len(recent) >= limits.QUARANTINES_MAX:
            raise Refusal(
                "POOL_QUARANTINED",
                f"pool {name} broke {len(recent)} times in {limits.QUARANTINE_WINDOW_S:g} s and is refused for now",
                retry_after_s=recent[-limits.QUARANTINES_MAX] + limits.QUARANTINE_WINDOW_S - now,
            )

    def refused_pool_count(self, now: float) -> int:
        """Pools that broke so often that nobody may attach them for now."""
        names = list(self._quarantines)  # a copy: metrics are read in another thread
        return sum(len(self._recent_quarantines(name, now)) >= limits.QUARANTINES_MAX for name in names)

    def _recent_quarantines(self, name: str, now: float) -> list[float]:
        times = list(self._quarantines.get(name, ()))
        return [time for time in times if time > now - limits.QUARANTINE_WINDOW_S]

    def drop(self, owner: Ownership) -> None:
        """The pool is gone: detached, closed, or its lease ended."""
        self.directory.remove(owner)
        self.observer.dropped(owner)

    def publish(self, owner: Ownership, acknowledged: int = 0) -> None:
        """Effects of steps up to this one may be told to watchers."""
        if owner.pool.log.publish(acknowledged):
            self.observer.published(owner)

    def expire(self, now: float) -> None:
        """Drops pools whose owner has been silent for the length of a lease, and holds of unary sessions whose time has
        come. A stream's holds end with its next step, whose reply says so."""
        for owner in self.directory.open_pools():
            if owner.unary and owner.pool.holds:
                self._expire_holds(owner, now)
        for stream in list(self.staging):
            stream.check_report(now)
        for owner in self.directory.expire(now):
            self.observer.expired(owner)
            self.drop(owner)
            if owner.stream is not None:
                cast("Stream", owner.stream).end("IDLE", "no message for the length of the lease")
        for name in list(self._quarantines):
            if self._quarantines[name][-1] <= now - limits.QUARANTINE_WINDOW_S:
                del self._quarantines[name]
