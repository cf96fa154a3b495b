"""Prefixes that live sequences are computing, so that a new prompt that begins with one may wait for it.

Lifecycle of an announcement:

    1. announced   a new sequence says which digests it will compute, from its matched tokens on
    2. advanced    a commit has published the first of these digests; the others are pending
    3. gone        all of its digests are published, or the sequence was dropped

An announcement is filed under its first place, and under each place that it advanced to. If a prompt's published prefix
ends at such a place, and its next digest is the announced one, the lookup returns how far both agree.
"""

from __future__ import annotations

from quire_allocator.core.spec import DIGEST_BYTES
from quire_allocator.core.stretches import common_positions


class Announcement:
    """One sequence's announcement: the first `digest_count` digests of its prompt, including published ones."""

    __slots__ = ("digest_count", "digests", "first", "namespace", "next_digest", "places")

    def __init__(self, namespace: str, digests: bytes, next_digest: int, digest_count: int) -> None:
        is_short = 2 * DIGEST_BYTES * (digest_count - next_digest) < len(digests)
        self.first = next_digest if is_short else 0  # number of the first of `digests`: only a short part is copied
        self.digests = digests[next_digest * DIGEST_BYTES : digest_count * DIGEST_BYTES] if is_short else digests
        self.namespace = namespace
        self.next_digest = next_digest
        self.digest_count = digest_count
        self.places: list[int] = []  # every value that `next_digest` has had, the first one included

    def key(self, place: int) -> bytes:
        """Returns the digest at `place`. Other prompts find this announcement under it."""
        place -= self.first
        return self.digests[place * DIGEST_BYTES : (place + 1) * DIGEST_BYTES]


class PendingPrefixes:
    """Finds the announcements of a pool by their next digests. `left_count` counts all their unpublished digests."""

    def __init__(self) -> None:
        self.left_count = 0
        self._places: dict[bytes, list[Announcement]] = {}

    def announce(self, namespace: str, digests: bytes, next_digest: int, digest_count: int) -> Announcement | None:
        """Notes that a new sequence will compute the first `digest_count` of `digests`, from number `next_digest` on.
        Returns None if none of them is left to compute."""
        if next_digest >= digest_count:
            return None
        announcement = Announcement(namespace, digests, next_digest, digest_count)
        self.left_count += digest_count - next_digest
        self._add_place(announcement)
        return announcement

    def advance(self, announcement: Announcement, next_digest: int) -> bool:
        """Notes that the digests before `next_digest` are published; returns whether any is still pending."""
        if next_digest >= announcement.digest_count:
            self.drop(announcement)
            return False
        if next_digest > announcement.next_digest:
            self.left_count -= next_digest - announcement.next_digest
            announcement.next_digest = next_digest
            self._add_place(announcement)
        return True

    def drop(self, announcement: Announcement) -> None:
        """Removes an announcement: its sequence is gone or has published all of it."""
        self.left_count -= announcement.digest_count - announcement.next_digest
        for place in announcement.places:
            key = announcement.key(place)
            announcements = self._places[key]
            announcements.remove(announcement)
            if not announcements:
                del self._places[key]
        announcement.places.clear()

    def pending_count(self, namespace: str, digests: bytes, matched: int, limit: int) -> int:
        """Counts digests after the first `matched` (of at most `limit`) that some sequence is computing."""
        if matched >= limit:
            return 0
        key = digests[matched * DIGEST_BYTES : (matched + 1) * DIGEST_BYTES]
        longest, start = 0, matched * DIGEST_BYTES
        for announcement in self._places.get(key, ()):
            is_here = matched in announcement.places and announcement.key(matched) == key
            if is_here and announcement.namespace == namespace:
                end, first = min(announcement.digest_count, limit) * DIGEST_BYTES, announcement.first * DIGEST_BYTES
                count = common_positions(announcement.digests[start - first : end - first], digests, start, end)
                if matched + count > announcement.next_digest:
                    longest = max(longest, count)
        return longest

    def __len__(self) -> int:
        return len(self._places)

    def _add_place(self, announcement: Announcement) -> None:
        announcement.places.append(announcement.next_digest)
        key = announcement.key(announcement.next_digest)
        self._places.setdefault(key, []).append(announcement)
