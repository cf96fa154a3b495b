"""A mirror of the blocks that one pool can hit, for routers that ask more often than a call allows.

    mirror = PrefixMirror(client.get_pool("default").spec)
    for event in client.watch_events("default"):
        mirror.apply(event)
        ...
        mirror.matched_token_count(digests, namespace)

Pure: no call, clock or lock. It answers as `match_prefix` would have when the last event was made. `age_s` of the
stream of events is the time since the last message of the allocator: some seconds while the connection works.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence, Set
from typing import Final, assert_never

from quire.errors import FailedPreconditionError, Reason
from quire.events import BlocksRemoved, BlocksStored, CacheEvent, IndexCleared, SnapshotEnd
from quire.types import GroupKind, GroupSpec, PoolSpec

NO_DIGESTS: Final[Set[bytes]] = frozenset()


class PrefixMirror:
    """Digests that are stored, by group and namespace.

    A session of other groups needs another mirror: where `session_id` changes, compare the pool's specification.

    Args:
        spec: of the pool.

    Raises:
        FailedPreconditionError: VERSION, this version cannot tell what a group of the pool can hit.

    Attributes:
        session_id: of the last event; empty before the first.
        is_exact: whether a snapshot is complete; before that, something may be missing.
    """

    def __init__(self, spec: PoolSpec) -> None:
        for group in spec.groups:
            if not group.kind.is_known:
                raise FailedPreconditionError(
                    f"the pool has groups of kind {group.kind.name}, whose hits this version cannot tell: update it",
                    Reason.VERSION,
                )
        self.session_id = b""
        self.is_exact = False
        # Groups with equal specifications change together, so the first one represents them all.
        self._groups = {group: spec.groups.index(group) for group in spec.groups}
        self._first = [self._groups[group] for group in spec.groups]
        self._digest_tokens = spec.block_size
        self._stored: defaultdict[tuple[int, str], set[bytes]] = defaultdict(set)

    def apply(self, event: CacheEvent) -> None:
        """Takes in the next event. One that is told twice, or for the second time after a resumption, does no harm."""
        self.session_id = event.session_id
        match event:
            case IndexCleared():
                self._stored.clear()
                self.is_exact = False
            case SnapshotEnd():
                self.is_exact = True
            case BlocksStored():
                self._stored[event.groups[0], event.namespace].update(event.digests)
            case BlocksRemoved():
                stored = self._stored[event.groups[0], event.namespace]
                stored.difference_update(event.digests)
                if not stored:
                    del self._stored[event.groups[0], event.namespace]

    def stored(self, group: int, namespace: str = "") -> Set[bytes]:
        """Returns the digests that are stored in one group; changes with the next event."""
        return self._stored.get((self._first[group], namespace), NO_DIGESTS)

    def matched_token_count(self, digests: Sequence[bytes], namespace: str = "") -> int:
        """Counts the leading tokens of a prompt, given as its digests, that every group can serve."""
        count = len(digests)
        for group, number in self._groups.items():
            if group.kind is GroupKind.FULL_ATTENTION:
                count = min(count, self._leading(group, self.stored(number, namespace), digests))
        while count and not all(
            self._serves(group, self.stored(number, namespace), digests, count)
            for group, number in self._groups.items()
        ):
            count -= 1
        return count * self._digest_tokens

    def _leading(self, group: GroupSpec, stored: Set[bytes], digests: Sequence[bytes]) -> int:
        """Counts the leading digests whose blocks are all stored."""
        stride = group.block_size // self._digest_tokens
        for end in range(stride, len(digests) + 1, stride):
            if digests[end - 1] not in stored:
                return end - stride
        return len(digests) // stride * stride

    def _serves(self, group: GroupSpec, stored: Set[bytes], digests: Sequence[bytes], count: int) -> bool:
        """Tells whether a group can serve so many leading digests; of full attention, no more than `_leading`."""
        if group.kind is GroupKind.STATE:
            return digests[count - 1] in stored
        token_count = count * self._digest_tokens
        if token_count % group.block_size:
            return False
        match group.kind:
            case GroupKind.FULL_ATTENTION:
                return True
            case GroupKind.SLIDING_WINDOW:
                first_needed = max(0, token_count - group.window + 1)
            case GroupKind.CHUNKED_LOCAL:
                first_needed = token_count // group.window * group.window
            case _:
                assert_never(group.kind)
        stride = group.block_size // self._digest_tokens
        ends = range((first_needed // group.block_size + 1) * stride, count + 1, stride)
        return all(digests[end - 1] in stored for end in ends)
