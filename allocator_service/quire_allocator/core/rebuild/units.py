"""Rebuilds windowed and state groups: published positions into units, sequences onto them."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import cast

from quire_allocator.core.groups.fallen import WindowScope
from quire_allocator.core.groups.manager import AnyManager
from quire_allocator.core.groups.states import StatePart
from quire_allocator.core.groups.units import UnitManager, UnitScope
from quire_allocator.core.groups.window_parts import WindowPart
from quire_allocator.core.groups.windows import WindowManager
from quire_allocator.core.pool import Pool
from quire_allocator.core.rebuild.report import BlockUse, ReportedSequence, ReportedStretch, refuse
from quire_allocator.core.rebuild.runs import claim_kept
from quire_allocator.core.rebuild.stops import Links
from quire_allocator.core.retention.stop import Unit, UnitKey
from quire_allocator.core.scopes import Namespace, Scoped
from quire_allocator.core.spec import DIGEST_BYTES, NULL_BLOCK


class UnitBuilder:
    """The common part of both kinds of unit builders; see `rebuild.Builder`.

    `links` has, for each published position, the digest of the previous position.

    Published units are made when the first sequence is located, as cached ones without holders.
    """

    def __init__(self, manager: AnyManager, pool: Pool, use: BlockUse) -> None:
        assert isinstance(manager, UnitManager)
        self._manager = manager
        self._pool = pool
        self._use = use
        self._number = pool.managers.index(manager)
        self._keys: dict[tuple[str, UnitKey], array[int]] = {}
        self.links: Links = {}
        self._by_block: dict[int, Unit] | None = None
        self._private: dict[int, tuple[Unit, int]] = {}  # first block of a private unit -> the unit, its position

    def read(self, prefix: ReportedStretch, column: int, first_place: int) -> None:
        """Takes in published blocks of the manager's group number `column`."""
        links, before = self.links.setdefault(prefix.namespace, {}), prefix.parent_digest
        for offset, block in enumerate(prefix.blocks):
            digest = prefix.digests[offset * DIGEST_BYTES : (offset + 1) * DIGEST_BYTES]
            key = (prefix.namespace, (prefix.first_position + offset, digest))
            if before:
                links[key[1]] = before
            before = digest
            blocks = self._keys.get(key)
            if blocks is None:
                blocks = self._keys[key] = array("I", [NULL_BLOCK]) * self._manager.width
            if blocks[column] != NULL_BLOCK:
                refuse(f"blocks {blocks[column]} and {block} have the same digest")
            blocks[column] = block

    def build(self, spaces: dict[str, Namespace], ranks: array[int]) -> list[tuple[int, int, Scoped]]:
        """Files all published units, and returns the units without holders."""
        cached: list[tuple[int, int, Scoped]] = []
        for unit in self._published().values():
            if not unit.live:
                cached.append((max([ranks[block] for block in unit.blocks]), unit.first_position, unit))
        return cached

    def _published(self) -> dict[int, Unit]:
        """Returns the published units by their first block; the first call files them."""
        if self._by_block is None:
            self._by_block = {}
            pool, width = self._pool, self._manager.width
            for (name, key), blocks in self._keys.items():
                if NULL_BLOCK in blocks:
                    self._use.drop(blocks)
                    continue
                scope = self._scope(pool.blocks.namespaces[name])
                unit = Unit(scope, blocks)
                unit.live = 0
                scope.add(unit, key)
                scope.cached += width
                pool.blocks.cached_count += width
                pool.blocks.policy.stored(unit, None)
                self._by_block[blocks[0]] = unit
        return self._by_block

    def _hold(self, scope: UnitScope, blocks: array[int], position: int, *, may_share: bool) -> Unit:
        """Returns the unit of these blocks, with one holder more."""
        unit = self._published().get(blocks[0])
        if unit is not None and unit.scope is scope and unit.blocks == blocks:
            self._manager._hold(unit)
            return unit
        if may_share and blocks[0] in self._private:
            unit, place = self._private[blocks[0]]
            if unit.scope is not scope or unit.blocks != blocks or place != position:
                refuse(f"block {blocks[0]} is shared by sequences with different prefixes")
            unit.live += 1
            return unit
        self._use.claim(blocks)
        (own,) = self._manager._new_units(scope, blocks)
        if may_share:
            self._private[blocks[0]] = own, position
        return own

    def _scope(self, space: Namespace) -> UnitScope:
        scope = space.scopes[self._number]
        assert isinstance(scope, UnitScope)
        return scope


class WindowBuilder(UnitBuilder):
    """Rebuilds groups of sliding windows and of chunks."""

    def locate(self, space: Namespace, sequence: ReportedSequence) -> Callable[[], WindowPart]:
        """Finds the units from the first position that the window still needs."""
        size, committed, name = self._manager.block_size, sequence.committed_token_count, sequence.sequence_id
        tables = [sequence.tables[group] for group in self._manager.groups]
        length = -(-sequence.token_count // size)
        if any(len(table) != length for table in tables):
            refuse(f"the tables of sequence {name} do not fit its {sequence.token_count} tokens")
        assert isinstance(self._manager, WindowManager)
        first = self._manager._rule.first_needed(committed) // size
        scope, units, tail = cast(WindowScope, self._scope(space)), list[Unit](), array("I")
        for position in range(first, length):
            blocks = array("I", [table[position] for table in tables])
            unit = self._hold(scope, blocks, position, may_share=position * size < committed)
            is_full = (position + 1) * size <= committed
            if unit.key is None and is_full:
                refuse(f"block {blocks[0]} of sequence {name} is computed but has no digest")
            if unit.key is not None and (unit.key[0] != position or position * size >= committed):
                refuse(f"block {blocks[0]} is in sequence {name} at a position where it was not published")
            if position * size >= committed:
                tail.extend(unit.blocks)
            else:
                units.append(unit)
        part = WindowPart(scope, first, units)
        part.tail = tail
        if sequence.kept:
            full = range(first, committed // size)
            part.kept = kept = claim_kept(self._manager.groups, self._use, sequence, full, length)
            scope.held += sum([len(own) for _, own in kept])
        return lambda: part


class StateBuilder(UnitBuilder):
    """Builds the part of recurrent states."""

    def locate(self, space: Namespace, sequence: ReportedSequence) -> Callable[[], StatePart]:
        """Finds the running block, which may be a checkpoint."""
        committed, name = sequence.committed_token_count, sequence.sequence_id
        tables = [sequence.tables[group] for group in self._manager.groups]
        if any(len(table) != 1 for table in tables):
            refuse(f"sequence {name} must have exactly one running block in each group of states")
        blocks = array("I", [table[0] for table in tables])
        is_quiet = sequence.token_count == committed
        scope = self._scope(space)
        unit = self._hold(scope, blocks, committed, may_share=is_quiet)
        if unit.key is not None and (unit.key[0] * self._pool.digest_tokens != committed or not is_quiet):
            refuse(f"the state of sequence {name} is published for another number of tokens")
        part = StatePart(scope, unit)
        return lambda: part
