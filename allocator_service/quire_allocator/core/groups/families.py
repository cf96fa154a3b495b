"""The checkpoints of one namespace, by families: those that begin with the same prefix, which is that of the first one.

A prompt of a million tokens leaves thousands of checkpoints. Another prompt parts from it early, and has none of them
if it has not the first: digests stand for all that is before them. So the first one is asked for, and the others only
where it agrees. A family keeps its root when that checkpoint is gone: it is the prefix that they have in common.
"""

from __future__ import annotations

from typing import Final

from quire_allocator.core.blocks import Evictor, Namespace
from quire_allocator.core.groups.depths import Depths
from quire_allocator.core.groups.units import Unit, UnitKey, UnitScope
from quire_allocator.core.spec import DIGEST_BYTES

_TRIED_FIRST: Final = 16  # of the deepest positions: whoever goes on from a prompt hits near its end


class StateScope(UnitScope):
    """What a namespace has in a manager of states.

    Attributes:
        roots: the root of each checkpoint's family, by their keys.
        families: the positions of each family's checkpoints, by its root.
        root_depths: the positions of the roots.
    """

    __slots__ = ("families", "root_depths", "roots")

    def __init__(self, namespace: Namespace, manager: Evictor) -> None:
        super().__init__(namespace, manager)
        self.roots: dict[UnitKey, UnitKey] = {}
        self.families: dict[UnitKey, Depths] = {}
        self.root_depths = Depths()

    def add(self, unit: Unit, key: UnitKey) -> Unit:
        """Publishes a checkpoint, as the root of a family of its own until it joins another one."""
        published = super().add(unit, key)
        if published is unit:
            self._file(key, key)
        return published

    def remove(self, unit: Unit) -> None:
        key = unit.key
        assert key is not None
        super().remove(unit)
        self._unfile(key)

    def join(self, key: UnitKey, root: UnitKey) -> None:
        """Files a new checkpoint in the family of another one that its sequence made or hit before."""
        if key != root:
            self._unfile(key)
            self._file(key, root)

    def deepest(self, digests: bytes, limit: int) -> Unit | None:
        """Returns the checkpoint of a prompt at the deepest position up to `limit`; None where there is none."""
        count, roots = self.depths.count_before(limit + 1), self.root_depths.count_before(limit + 1)
        if 2 * roots >= count:  # families are no help
            return self._last(self.depths.positions, count, 0, 0, digests)
        tried = max(0, count - _TRIED_FIRST)
        found = self._last(self.depths.positions, count, tried, 0, digests)
        if found is not None:
            return found
        for position in self.root_depths.positions[:roots]:
            family = self.families.get((position, _digest_at(digests, position)))
            if family is not None:
                above = found.first_position + 1 if found is not None else 0
                deeper = self._last(family.positions, family.count_before(limit + 1), 0, above, digests)
                found = deeper or found
        return found

    def _last(self, positions: list[int], end: int, first: int, above: int, digests: bytes) -> Unit | None:
        """Returns the deepest checkpoint of a prompt among `positions[first:end]` that are not before `above`."""
        for i in range(end - 1, first - 1, -1):
            position = positions[i]
            if position < above:
                return None
            unit = self.find(position, _digest_at(digests, position))
            if unit is not None:
                return unit
        return None

    def _file(self, key: UnitKey, root: UnitKey) -> None:
        self.roots[key] = root
        family = self.families.get(root)
        if family is None:
            family = self.families[root] = Depths()
            self.root_depths.add(root[0])
        family.add(key[0])

    def _unfile(self, key: UnitKey) -> None:
        root = self.roots.pop(key)
        family = self.families[root]
        family.remove(key[0])
        if not family.positions:
            del self.families[root]
            self.root_depths.remove(root[0])


def _digest_at(digests: bytes, position: int) -> bytes:
    end = position * DIGEST_BYTES
    return digests[end - DIGEST_BYTES : end]
