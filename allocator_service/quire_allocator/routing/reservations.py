"""The reservations of one pool: prompts that were routed to its worker and that the worker has not admitted yet.

Lifecycle of a reservation:

    1. made      Route has chosen this pool: the prompt counts among the worker's load, and its prefix as promised
    2. renewed   the worker asked for the prompt's blocks and was refused for now: the worker has the prompt
    3. gone      taken (the worker admitted the prompt), refused (the worker never will), expired, or lost with its pool

A reservation holds no block. The worker does not know it: the allocator recognizes prompts by namespace and last
digest. If two prompts are equal, the older reservation is taken first.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Hashable
from typing import Final

from quire_allocator.core.pending import Announcement, PendingPrefixes
from quire_allocator.core.spec import DIGEST_BYTES

FRAME_BYTES: Final = 512  # bytes of a reservation without its digests


class RouteReservation:
    """One routed prompt.

    Attributes:
        caller: the caller of Route.
        byte_count: bytes of its caller's limit that it takes.
        shared_token_count: tokens that were promised: published at the route, or computed for other prompts.
        uncached_token_count: the rest of the prompt.
        length_s: seconds from its start, or its last renewal, to its end.
        end_s: when it ends, unless it is renewed.
        is_gone: whether it has ended.
    """

    __slots__ = (
        "announcement",
        "byte_count",
        "caller",
        "digests",
        "end_s",
        "is_gone",
        "length_s",
        "namespace",
        "shared_token_count",
        "uncached_token_count",
    )

    def __init__(self, namespace: str, digests: bytes, *, caller: Hashable, length_s: float) -> None:
        self.namespace = namespace
        self.digests = digests
        self.caller = caller
        self.byte_count = FRAME_BYTES + len(digests)
        self.shared_token_count = self.uncached_token_count = 0
        self.length_s = length_s
        self.end_s = 0.0
        self.is_gone = False
        self.announcement: Announcement | None = None

    @property
    def key(self) -> tuple[str, bytes]:
        """Returns the key that an admission of the same prompt has, too."""
        return key_of(self.namespace, self.digests)


def key_of(namespace: str, digests: bytes) -> tuple[str, bytes]:
    """Returns the key of a prompt: namespace and last digest, which stands for everything before it."""
    return namespace, digests[-DIGEST_BYTES:]


class Reservations:
    """The reservations of one pool.

    Attributes:
        uncached_token_count: tokens that the worker must compute for all reservations.
        pending: the prefixes that the worker will compute for the reservations.
    """

    def __init__(self) -> None:
        self.uncached_token_count = 0
        self.pending = PendingPrefixes()
        self._by_key: dict[tuple[str, bytes], deque[RouteReservation]] = {}
        # A heap of (time, number, reservation). At this time, `expire` ends the reservation, or schedules it again.
        self._ends: list[tuple[float, int, RouteReservation]] = []
        self._number = 0
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, reservation: RouteReservation, hit_digest_count: int, digest_count: int, now: float) -> None:
        """Adds a reservation, which computes the digests from number `hit_digest_count` to number `digest_count`."""
        made = self.pending.announce(reservation.namespace, reservation.digests, hit_digest_count, digest_count)
        reservation.announcement = made
        self._by_key.setdefault(reservation.key, deque()).append(reservation)
        self.uncached_token_count += reservation.uncached_token_count
        self._count += 1
        reservation.end_s = now + reservation.length_s
        self._schedule(reservation)

    def find(self, namespace: str, digests: bytes) -> RouteReservation | None:
        """Returns the oldest reservation of a prompt."""
        found = self._by_key.get(key_of(namespace, digests))
        return found[0] if found else None

    def renew(self, reservation: RouteReservation, now: float) -> None:
        """Lets a reservation end later, because the worker has asked for its blocks."""
        reservation.end_s = max(reservation.end_s, now + reservation.length_s)

    def remove(self, reservation: RouteReservation) -> None:
        """Removes a reservation of this pool."""
        equals = self._by_key[reservation.key]
        equals.remove(reservation)
        if not equals:
            del self._by_key[reservation.key]
        if reservation.announcement is not None:
            self.pending.drop(reservation.announcement)
        self.uncached_token_count -= reservation.uncached_token_count
        self._count -= 1
        # The heap keeps a removed reservation until its scheduled time. This line frees the digests earlier.
        reservation.is_gone, reservation.digests, reservation.announcement = True, b"", None

    def expire(self, now: float) -> list[RouteReservation]:
        """Removes the reservations whose time has ended, and returns them."""
        ended = list[RouteReservation]()
        while self._ends and self._ends[0][0] <= now:
            _, _, reservation = heapq.heappop(self._ends)
            if reservation.is_gone:
                continue
            if reservation.end_s > now:
                self._schedule(reservation)
            else:
                self.remove(reservation)
                ended.append(reservation)
        return ended

    def unordered(self) -> list[RouteReservation]:
        """Returns the reservations of all prompts, equal ones by age."""
        return [reservation for equals in self._by_key.values() for reservation in equals]

    def check_invariants(self) -> None:
        """Checks that sums and indexes agree.

        Raises:
            AssertionError: with the broken invariant in its message.
        """
        every = self.unordered()
        assert len(every) == self._count, f"{self._count} reservations are counted, {len(every)} are there"
        tokens = sum([reservation.uncached_token_count for reservation in every])
        assert tokens == self.uncached_token_count, f"{self.uncached_token_count} tokens are counted, not {tokens}"
        announced = sum([reservation.announcement is not None for reservation in every])
        listed = {id(found) for founds in self.pending._places.values() for found in founds}
        assert len(listed) == announced, f"{len(listed)} prefixes are announced by {announced} reservations"

    def _schedule(self, reservation: RouteReservation) -> None:
        self._number += 1
        heapq.heappush(self._ends, (reservation.end_s, self._number, reservation))
