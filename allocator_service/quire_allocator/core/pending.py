"""Prefixes that a live sequence is computing right now, so that the next prompt that begins with one may wait for it.

Lifecycle of a chain:

    1. announced   a new sequence says which digests it will compute, from its matched tokens on
    2. advanced    a commit has published the first of them; what is left is pending
    3. gone        all of it is published, or the sequence was dropped

A chain is found at the places where it was announced and advanced to: a prompt whose published prefix ends there, and
that goes on with the chain's next digest, is told how far the chain goes along with it.
"""

from __future__ import annotations

from quire_allocator.core.spec import DIGEST_BYTES

PlaceKey = tuple[str, int, bytes]  # namespace, number of the digest, the digest


class Chain:
    """What one sequence announced: the first `digest_count` digests of its prompt, those already published included."""

    __slots__ = ("digest_count", "digests", "keys", "namespace", "next_digest")

    def __init__(self, namespace: str, digests: bytes, next_digest: int, digest_count: int) -> None:
        self.namespace = namespace
        self.digests = digests
        self.next_digest = next_digest
        self.digest_count = digest_count
        self.keys: list[PlaceKey] = []


class PendingPrefixes:
    """Every chain of a pool."""

    def __init__(self) -> None:
        self._places: dict[PlaceKey, list[Chain]] = {}

    def announce(self, namespace: str, digests: bytes, next_digest: int, digest_count: int) -> Chain | None:
        """A new sequence will compute the first `digest_count` of `digests`, from number `next_digest` on; None where
        nothing is left of them."""
        if next_digest >= digest_count:
            return None
        chain = Chain(namespace, digests, next_digest, digest_count)
        self._add_place(chain)
        return chain

    def advance(self, chain: Chain, next_digest: int) -> bool:
        """The chain is published up to there; returns whether anything is still pending."""
        if next_digest >= chain.digest_count:
            self.drop(chain)
            return False
        if next_digest > chain.next_digest:
            chain.next_digest = next_digest
            self._add_place(chain)
        return True

    def drop(self, chain: Chain) -> None:
        """Nobody computes it any more."""
        for key in chain.keys:
            chains = self._places[key]
            chains.remove(chain)
            if not chains:
                del self._places[key]
        chain.keys.clear()

    def pending_count(self, namespace: str, digests: bytes, matched: int, limit: int) -> int:
        """Digests after the first `matched` (of at most `limit`) that some sequence is computing."""
        if matched >= limit:
            return 0
        start = matched * DIGEST_BYTES
        chains = self._places.get((namespace, matched, digests[start : start + DIGEST_BYTES]))
        if chains is None:
            return 0
        agreed = [
            (_agree(chain.digests, digests, matched, min(chain.digest_count, limit)), chain.next_digest)
            for chain in chains
        ]
        return max((common - matched for common, computed in agreed if common > computed), default=0)

    def __len__(self) -> int:
        return len(self._places)

    def _add_place(self, chain: Chain) -> None:
        start = chain.next_digest * DIGEST_BYTES
        key = (chain.namespace, chain.next_digest, chain.digests[start : start + DIGEST_BYTES])
        chain.keys.append(key)
        self._places.setdefault(key, []).append(chain)


def _agree(ours: bytes, theirs: bytes, known: int, limit: int) -> int:
    """Digests in which two chains agree from the first on, at least `known` + 1, at most `limit`."""
    low, high = known + 1, min(limit, len(theirs) // DIGEST_BYTES)
    start = known * DIGEST_BYTES
    while low < high:
        middle = (low + high + 1) // 2
        if ours[start : middle * DIGEST_BYTES] == theirs[start : middle * DIGEST_BYTES]:
            low = middle
        else:
            high = middle - 1
    return low
