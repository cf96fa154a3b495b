"""Windowed attention and recurrent state: published blocks one position at a time.

A *unit* is one position of all groups of one specification. These groups give blocks back at the head, so runs do not
fit. Units that windows give back together, and that nothing needs, become a stretch (`fallen.py`).
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import TypeVar

from quire_allocator.core.groups.depths import Depths
from quire_allocator.core.groups.manager import Hit, IndexedStretch, Manager
from quire_allocator.core.retention.stop import Unit, UnitKey
from quire_allocator.core.scopes import Evictor, Namespace, Scope, Scoped
from quire_allocator.core.sequence import Part
from quire_allocator.core.spec import DIGEST_BYTES, Swap


class UnitScope(Scope):
    """The published units of one namespace in one manager.

    A unit is found by position and digest. A digest stands for a whole prefix, and so for one position. Units are
    therefore filed by the digest alone, because it hashes faster. A digest occurs at two positions only if an owner
    makes digests up."""

    __slots__ = ("_by_digest", "_repeated", "depths")

    def __init__(self, namespace: Namespace, manager: Evictor) -> None:
        super().__init__(namespace, manager)
        self._by_digest: dict[bytes, Unit] = {}
        self._repeated: dict[UnitKey, Unit] = {}  # units with a digest that another position has, too; usually none
        self.depths = Depths()  # positions of the published units, of all prefixes

    def find(self, position: int, digest: bytes) -> Unit | None:
        """Returns the published unit of this position and digest; None if there is none."""
        unit = self._by_digest.get(digest)
        if unit is not None and unit.first_position == position:
            return unit
        return self._repeated.get((position, digest)) if self._repeated else None

    def units(self) -> list[Unit]:
        """Returns all published units."""
        return [*self._by_digest.values(), *self._repeated.values()]

    def add(self, unit: Unit, key: UnitKey) -> Unit:
        """Publishes a unit, unless another unit is published with this key. Returns the published unit."""
        if self._repeated and key in self._repeated:
            return self._repeated[key]
        published = self._by_digest.setdefault(key[1], unit)
        if published is not unit:
            if published.first_position == key[0]:
                return published
            self._repeated[key] = unit
        unit.now_published(key[0], key[1])
        self.depths.add(key[0])
        return unit

    def remove(self, unit: Unit) -> None:
        """Removes a unit from the index, so that no prompt can hit it."""
        position, digest = unit.first_position, unit.first_digest
        if self._by_digest.get(digest) is unit:
            del self._by_digest[digest]
        else:
            del self._repeated[position, digest]
        self.depths.remove(position)
        unit.now_published(0, b"")


class UnitHit(Hit):
    """Published units that serve a prefix."""

    __slots__ = ("units",)

    def __init__(self, token_count: int, cached_block_count: int, units: list[Unit]) -> None:
        super().__init__(token_count, 0, cached_block_count)
        self.units = units


NO_UNITS = UnitHit(0, 0, [])


UnitScopeT = TypeVar("UnitScopeT", bound=UnitScope)
UnitHitT = TypeVar("UnitHitT", bound=UnitHit)
PartT = TypeVar("PartT", bound=Part)


class UnitManager(Manager[UnitScopeT, UnitHitT, PartT]):
    """Base of the managers of units: references, publication, eviction."""

    def walk(self, scope: UnitScopeT) -> Iterator[IndexedStretch]:
        name = scope.namespace.name
        for unit in scope.units():
            if unit.is_published:  # the unit may have been removed since the walk began
                yield IndexedStretch(name, self.groups, self.spec, b"", unit.first_digest, unit.first_position)

    def evict(self, entry: Scoped, wanted: int) -> int:
        assert isinstance(entry, Unit)
        self._blocks.policy.evicted(entry, self.width)
        self._unpublish(entry)
        return self.width

    def drop_path(self, scope: UnitScopeT, digests: bytes, kept_digest_count: int) -> None:
        for position, digest in self._places(digests, kept_digest_count):
            unit = scope.find(position, digest)
            if unit is not None and not unit.live:
                self._drop(unit)

    # -- for subclasses ------------------------------------------------------------------------------------------------

    def _places(self, digests: bytes, kept_digest_count: int) -> Iterator[UnitKey]:
        """Yields the keys of the positions of a path after its first `kept_digest_count` digests."""
        for position in range(kept_digest_count // self._stride, len(digests) // (self._stride * DIGEST_BYTES)):
            yield position, self._digest_at(digests, (position + 1) * self.block_size)

    def _drop(self, unit: Unit) -> None:
        """Empties the blocks of a cached unit, although no grant needs the blocks."""
        self._unpublish(unit)
        self._blocks.dropped(unit.scope, self.width)

    def _new_units(self, scope: UnitScope, blocks: array[int]) -> list[Unit]:
        """Makes private units from newly granted blocks; a single unit keeps the array itself."""
        width = self.width
        scope.held += len(blocks)
        if len(blocks) == width:  # a single unit, as usual while decoding
            return [Unit(scope, blocks)]
        return [Unit(scope, blocks[i : i + width]) for i in range(0, len(blocks), width)]

    def _hold_hit(self, hit: UnitHit) -> None:
        """Lets a new sequence hold the units that it hit."""
        for unit in hit.units:
            unit.was_hit = True
            self._blocks.policy.hit(unit)
            self._hold(unit)

    def _hold(self, unit: Unit) -> None:
        """Counts one more table that contains the unit. The first table takes the unit out of the cache."""
        unit.live += 1
        if unit.live == 1:
            self._retention.held(unit, self.width)

    def _release(self, unit: Unit) -> None:
        """Counts one fewer table that contains the unit. Without any table, the unit is cached, or empty."""
        unit.live -= 1
        if unit.live:
            return
        if unit.is_published:
            self._retention.cached(unit, self.width)
        else:
            self._give_back(unit.scope, unit.blocks)

    def _publish(self, scope: UnitScope, unit: Unit, key: UnitKey, swaps: list[Swap], position: int) -> Unit:
        """Publishes a private unit under its key. The caller reports it to the log. Returns the unit to use from now
        on: the earlier unit if the key was published before."""
        other = scope.add(unit, key)
        if other is unit:
            self._blocks.policy.stored(unit, None)
            return unit
        swaps.extend(Swap(group, position, block) for group, block in zip(self.groups, other.blocks))
        self._hold(other)
        self._release(unit)
        return other

    def _unpublish(self, unit: Unit) -> None:
        """Takes a cached unit out of the index and the queue; its blocks become empty."""
        self._retract(unit)
        self._blocks.queue.discard(unit)
        self._blocks.give_back(unit.blocks)
        self._retention.lost(unit)

    def _retract(self, unit: Unit) -> None:
        """Takes a unit out of the index, so that no prompt can hit it."""
        assert unit.is_published
        scope = unit.scope
        assert isinstance(scope, UnitScope)
        self._log.removed(scope, unit.first_position, unit.first_digest, 0, DIGEST_BYTES)
        scope.remove(unit)
        unit.keep_until_ms = 0

    def _digest_at(self, digests: bytes, token_count: int, first_digest: int = 0) -> bytes:
        """Returns the digest of the prefix of `token_count` tokens; `digests` begins with number `first_digest`."""
        start = (token_count // self._digest_tokens - 1 - first_digest) * DIGEST_BYTES
        return digests[start : start + DIGEST_BYTES]
