"""Groups of recurrent state (mamba, linear attention): one running block, and checkpoints that can be hit.

The running block holds the state after the committed tokens; every forward pass overwrites it in place. A commit that
publishes this block turns it into a checkpoint. No granted token may then be left to compute: its pass would overwrite
the state without a grow that copies it. The commit must also end exactly at

    a multiple of the group's block size, or
    a place where later hits should be able to end (`Commit.ends`).

A published block never changes, so the next grow replaces it by a copy. Without room for a copy, a checkpoint that no
other sequence holds is given up instead. A hit is one block: the deepest checkpoint of the prefix.

A table here has one entry, the running block.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence

from quire_allocator.core.block_states import BlockStates
from quire_allocator.core.groups.manager import Commit
from quire_allocator.core.groups.units import NO_UNITS, UnitHit, UnitManager, UnitScope
from quire_allocator.core.retention.stop import Unit, UnitKey
from quire_allocator.core.scopes import Namespace, Scoped
from quire_allocator.core.sequence import Part
from quire_allocator.core.spec import DIGEST_BYTES, NEVER, Copy


class StatePart(Part):
    """The state of one sequence in this manager.

    Attributes:
        unit: the running block of each group; None before the first grow.
        last: the checkpoint that the sequence made or hit last; None before the first.
    """

    __slots__ = ("last", "scope", "unit")

    def __init__(self, scope: UnitScope, unit: Unit | None) -> None:
        self.scope = scope
        self.unit = unit
        self.last: Unit | None = None


class StateManager(UnitManager[UnitScope, UnitHit, StatePart]):
    """All groups of one kind of state. The base class `Manager` documents the methods."""

    in_place = True
    settles = True

    def new_scope(self, namespace: Namespace) -> UnitScope:
        return UnitScope(namespace, self)

    def find(self, scope: UnitScope, digests: bytes, token_limit: int) -> UnitHit:
        """Returns the deepest checkpoint at or before `token_limit` tokens."""
        limit = min(token_limit // self._digest_tokens, len(digests) // DIGEST_BYTES)
        for position in reversed(scope.depths.between(0, limit + 1)):
            unit = scope.find(position, digests[(position - 1) * DIGEST_BYTES : position * DIGEST_BYTES])
            if unit is not None:
                # The sequence keeps no block of the hit: its first grow replaces the checkpoint by a copy.
                return UnitHit(position * self._digest_tokens, 0 if unit.live else self.width, [unit])
        return NO_UNITS

    def needed_after(self, hit: UnitHit, token_count: int) -> int:
        return self.width

    def open(self, scope: UnitScope, hit: UnitHit) -> StatePart:
        self._hold_hit(hit)
        part = StatePart(scope, hit.units[0] if hit.units else None)
        if hit.units:
            part.last = hit.units[0]
        return part

    def needed(self, part: StatePart, token_count: int, until: int) -> int:
        return 0 if self._is_private(part) else self.width

    def footprint(self, part: StatePart, token_count: int) -> int:
        return self.width

    def peak(self, token_count: int, pass_token_count: int) -> int:
        return self.width

    def room(self, part: StatePart, token_count: int) -> int:
        """Returns no bound while the running block is the sequence's own."""
        return NEVER if self._is_private(part) else token_count

    def grow(self, part: StatePart, token_count: int, until: int, blocks: array[int], copies: list[Copy]) -> int:
        """Replaces a running block by a copy if it is a checkpoint or shared."""
        if blocks:
            if part.unit is not None:
                copies.extend(map(Copy, part.unit.blocks, blocks))
                self._release(part.unit)
            (part.unit,) = self._new_units(part.scope, blocks)
        return NEVER

    def replaced_count(self, part: StatePart, token_count: int) -> int:
        """Counts the running block if it is a checkpoint that no other sequence holds."""
        return self.width if part.unit is not None and part.unit.is_published and part.unit.live == 1 else 0

    def give_up(self, part: StatePart) -> None:
        """Makes the running block private again if it is a checkpoint that no other sequence holds."""
        if self.replaced_count(part, 0):
            assert part.unit is not None
            blocks, part.scope.held = part.unit.blocks, part.scope.held - self.width
            unit = part.unit
            self._retract(unit)
            self._retention.lost(unit)
            (part.unit,) = self._new_units(part.scope, blocks)

    def commit(self, part: StatePart, new: Commit) -> None:
        """Makes a checkpoint, if the committed tokens end where a checkpoint belongs."""
        until = new.until
        if part.unit is None or until == 0 or (until % self.block_size and until not in new.ends):
            return
        if not self._is_private(part):
            return
        digest = self._digest_at(new.digests, until, new.committed // self._digest_tokens)
        if not digest:
            return
        key = (until // self._digest_tokens, digest)
        own, part.unit = part.unit, self._publish(part.scope, part.unit, key, new.swaps, 0)
        if part.unit is own:
            self._log.stored(part.scope, b"", digest, key[0])
        part.last = part.unit

    def fork(self, part: StatePart, committed: int) -> StatePart:
        """Shares the running block. Forks that grow copy it; the last writes in place, unless it is published."""
        if part.unit is not None:
            part.unit.live += 1
        child = StatePart(part.scope, part.unit)
        child.last = part.last
        return child

    def shrink(self, part: StatePart, until: int) -> None:
        """Does nothing: a state takes as many blocks at every length."""

    def free(self, part: StatePart) -> None:
        if part.unit is not None:
            self._release(part.unit)
            part.unit = None

    def mark(self, states: BlockStates, scopes: Sequence[UnitScope], parts: Sequence[StatePart]) -> None:
        units = {part.unit for part in parts if part.unit is not None}
        units |= {unit for scope in scopes for unit in scope.units()}
        for unit in units:
            states.mark(unit.blocks, unit.live, published=unit.is_published)

    def tables(self, part: StatePart) -> list[array[int]]:
        return self.added(part.unit.blocks if part.unit is not None else array("I"))

    def shared_token_count(self, part: StatePart) -> int:
        """Counts all tokens of the sequence if other sequences hold the same state, else none."""
        return NEVER if part.unit is not None and part.unit.live > 1 else 0

    def _places(self, digests: bytes, kept_digest_count: int) -> Iterator[UnitKey]:
        for count in range(kept_digest_count + 1, len(digests) // DIGEST_BYTES + 1):
            yield count, digests[(count - 1) * DIGEST_BYTES : count * DIGEST_BYTES]

    def _is_private(self, part: StatePart) -> bool:
        """Tells whether the running block may be overwritten: it is neither shared nor published."""
        unit = part.unit
        return unit is not None and unit.live == 1 and not unit.is_published

    # -- where hits can end -------------------------------------------------------------------------------------------

    def digest_at(self, part: StatePart, token_count: int) -> bytes:
        """Returns the digest of the sequence's last checkpoint, if that is at `token_count` and still published."""
        unit = part.last
        is_there = unit is not None and unit.is_published and self._token_count(unit) == token_count
        return unit.first_digest if unit is not None and is_there else b""

    def last_end(self, part: StatePart, committed: int) -> int:
        """Returns the token count of the sequence's last checkpoint, if still published and at an edge; else 0."""
        unit = part.last
        count = self._token_count(unit) if unit is not None and unit.is_published else 0
        return count if count % self._edge_tokens == 0 else 0

    def units_at(self, part: StatePart, token_count: int, digest: bytes) -> list[Unit] | None:
        """Returns the checkpoint of any sequence after `token_count` tokens with this digest; None if there is none."""
        unit = self.checkpoint_at(part.scope, token_count, digest)
        return None if unit is None else [unit]

    def checkpoint_at(self, scope: UnitScope, token_count: int, digest: bytes) -> Unit | None:
        """Returns the checkpoint after `token_count` tokens with this digest; None if there is none."""
        return scope.find(token_count // self._digest_tokens, digest)

    def checkpoints(self, scope: UnitScope) -> list[tuple[int, bytes]]:
        """Returns the token count and digest of each checkpoint."""
        return [(self._token_count(unit), unit.first_digest) for unit in scope.units()]

    def replaced(self, entry: Scoped) -> None:
        """Drops a cached checkpoint that no request has hit."""
        assert isinstance(entry, Unit)
        if entry.is_published and not entry.live and not entry.was_hit and not entry.is_needed():
            self._drop(entry)

    def _token_count(self, unit: Unit) -> int:
        return unit.first_position * self._digest_tokens
