"""A mirror of one pool's cached prefixes, for routers that look up prefixes too often for a call each.

    mirror = PrefixMirror(client.get_pool("default").spec)
    for event in client.watch_events("default"):
        mirror.apply(event)
        ...
        mirror.matched_token_count(digests, namespace)

Pure: no call, clock or lock. The mirror answers as `match_prefix` would have answered at the time of the last event.
The mirror's age is `age_s` of the event stream: the time since the allocator's last message. On a working connection
that is a few seconds.
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
    """The stored digests of one pool, by group and namespace.

    A session with different groups needs a new mirror: when `session_id` changes, compare the pool's specification.

    Args:
        spec: the pool's specification.

    Raises:
        FailedPreconditionError: VERSION, this version does not know the hit rules of one of the pool's groups.

    Attributes:
        session_id: the last event's session; empty before the first event.
        is_exact: whether a snapshot is complete. Before that, digests may be missing.
    """

    def __init__(self, spec: PoolSpec) -> None:
        for group in spec.groups:
            if not group.kind.is_known:
                raise FailedPreconditionError(
                    f"the pool has groups of kind {group.kind.name}, and this version cannot compute their hits: "
                    "update Quire",
                    Reason.VERSION,
                )
        self.session_id = b""
        self.is_exact = False
        # Groups with equal specifications change together, so the first group represents all of them.
        self._groups = {group: spec.groups.index(group) for group in spec.groups}
        self._first = [self._groups[group] for group in spec.groups]
        self._digest_tokens = spec.block_size
        self._stored: defaultdict[tuple[int, str], set[bytes]] = defaultdict(set)

    def apply(self, event: CacheEvent) -> None:
        """Applies the next event. Applying an event twice, for example after a resumption, does no harm."""
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
        """Returns the digests stored in one group. The set changes with the next event."""
        return self._stored.get((self._first[group], namespace), NO_DIGESTS)

    def matched_token_count(self, digests: Sequence[bytes], namespace: str = "") -> int:
        """Returns how many leading tokens of a prompt, given as its digests, every group can serve."""
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
        """Returns the number of leading digests that are all stored."""
        stride = group.block_size // self._digest_tokens
        for end in range(stride, len(digests) + 1, stride):
            if digests[end - 1] not in stored:
                return end - stride
        return len(digests) // stride * stride

    def _serves(self, group: GroupSpec, stored: Set[bytes], digests: Sequence[bytes], count: int) -> bool:
        """Tells whether a group can serve `count` leading digests. With full attention, `_leading` is the limit."""
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
