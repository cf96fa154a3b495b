"""Groups of recurrent state (mamba, linear attention): one running block, and checkpoints that can be hit.

The running block holds the state after the committed tokens; every forward pass overwrites it in place. It becomes a
checkpoint by being published. A commit does that where no granted token is left to compute, whose pass would overwrite
the state without a grow that copies it, and where the commit ends exactly at

    a multiple of the group's block size, or
    a boundary of the sequence (`SequenceState.boundaries`): where a later prompt may part from it.

As a published block never changes, the next grow replaces it by a copy; where there is no room for one, a checkpoint
that no other sequence holds is given up instead. So a hit is one block: the deepest checkpoint of the prefix.

Those at boundaries stay as long as their prefix does, the others leave before all else (`retention.py`). Checkpoints
that nobody has used are bounded besides, for they are made in the hope that somebody will:

    per sequence   at most `checkpoints_max`. With one more, its oldest between boundaries is dropped; then those at
                   boundaries, of which the first, where the shortest prompts part, stays longest
    per path       where a path has more than `checkpoints_max`, used or not, those that no boundary needs are dropped,
                   the shallowest first: where paths part, and at the last turns of a chat, there are boundaries
    per pool       those between boundaries have at most half of the blocks, where other groups need some, too

A table here has one entry, the running block.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import cast

from quire_allocator.core.block_states import BlockStates
from quire_allocator.core.blocks import Blocks
from quire_allocator.core.events import EventLog
from quire_allocator.core.groups.units import NO_UNITS, Unit, UnitHit, UnitKey, UnitManager, UnitScope
from quire_allocator.core.sequence import Part
from quire_allocator.core.spec import (
    CHECKPOINTS_MAX_DEFAULT,
    DIGEST_BYTES,
    NEVER,
    Copy,
    GroupKind,
    GroupSpec,
    PoolSpec,
    Swap,
)


class Checkpoint(Unit):
    """A state of one sequence; once it is published, also a place on a path.

    Attributes:
        before: the one that its sequence made or hit before, as far as there was one.
    """

    __slots__ = ("before",)

    def __init__(self, scope: UnitScope, blocks: array[int]) -> None:
        super().__init__(scope, blocks)
        self.before: Checkpoint | None = None

    def place_behind(self, before: Checkpoint | None) -> None:
        """Notes what it comes after; one that was given up and made again is where it was."""
        if before is not self:
            self.before = before

    def path(self) -> list[Checkpoint]:
        """Returns those of its path that are published, the deepest first, and forgets the others."""
        found, last = list[Checkpoint](), self
        if self.is_published:
            found.append(self)
        while last.before is not None:
            if not last.before.is_published:
                last.before = last.before.before
            else:
                last = last.before
                found.append(last)
        return found


class StatePart(Part):
    """What one sequence has here.

    Attributes:
        unit: the running block of each group; None before the first grow.
        boundaries: token counts at which it makes a checkpoint, beside multiples of the block size; rising.
        checkpoints: those that it made and nobody has used, as far as is known; oldest first.
        last: the one that it made or hit last; None before the first.
    """

    __slots__ = ("boundaries", "checkpoints", "last", "scope", "unit")

    def __init__(self, scope: UnitScope, unit: Unit | None, boundaries: tuple[int, ...]) -> None:
        self.scope = scope
        self.unit = unit
        self.boundaries = boundaries
        self.checkpoints: list[Unit] = []
        self.last: Checkpoint | None = None

    def end_at(self, ends: tuple[int, ...]) -> None:
        self.boundaries = ends


class StateManager(UnitManager[StatePart]):
    """All groups of one kind of state. `Manager` says what its methods promise."""

    in_place = True
    settles = True

    def __init__(self, spec: GroupSpec, groups: Sequence[int], pool: PoolSpec, blocks: Blocks, log: EventLog) -> None:
        super().__init__(spec, groups, pool, blocks, log)
        self._checkpoints_max = spec.checkpoints_max or CHECKPOINTS_MAX_DEFAULT
        state_count = sum([group.kind is GroupKind.STATE for group in pool.groups])
        has_others = state_count < len(pool.groups)
        self._between_max = pool.block_count // (2 * state_count) if has_others else pool.block_count
        self._between: dict[Unit, None] = {}  # cached and unused checkpoints between boundaries, the oldest first

    def find(self, scope: UnitScope, digests: bytes, token_limit: int) -> UnitHit:
        """Returns the deepest checkpoint at or before `token_limit` tokens."""
        limit = min(token_limit // self._digest_tokens, len(digests) // DIGEST_BYTES)
        for position in reversed(scope.depths.between(0, limit + 1)):
            unit = scope.find(position, digests[(position - 1) * DIGEST_BYTES : position * DIGEST_BYTES])
            if unit is not None:
                # The sequence holds no block of the hit: its first grow copies the checkpoint and lets go of it.
                return UnitHit(position * self._digest_tokens, 0, 0 if unit.live else self.width, 0, [unit])
        return NO_UNITS

    def needed_after(self, hit: UnitHit, token_count: int) -> int:
        return self.width

    def open(self, scope: UnitScope, hit: UnitHit, boundaries: tuple[int, ...]) -> StatePart:
        self._hold_hit(hit)
        part = StatePart(scope, hit.units[0] if hit.units else None, boundaries)
        if hit.units:
            part.last = cast(Checkpoint, hit.units[0])
        return part

    def needed(self, part: StatePart, token_count: int, until: int) -> int:
        return 0 if self._is_private(part) else self.width

    def footprint(self, part: StatePart, token_count: int) -> int:
        return self.width

    def peak(self, token_count: int, pass_token_count: int) -> int:
        return self.width

    def room(self, part: StatePart, token_count: int) -> int:
        """Returns any length, as long as the running block is the sequence's own."""
        return NEVER if self._is_private(part) else token_count

    def grow(self, part: StatePart, token_count: int, until: int, blocks: array[int], copies: list[Copy]) -> int:
        """Replaces a running block by a copy where it is a checkpoint, or shared."""
        if blocks:
            if part.unit is not None:
                copies.extend(map(Copy, part.unit.blocks, blocks))
                self._leave(part, part.unit)
            (part.unit,) = self._new_units(part.scope, blocks)
        return NEVER

    def let_go(self, part: StatePart, token_count: int) -> int:
        """Counts the running block where it is a checkpoint that no other sequence holds."""
        return self.width if part.unit is not None and part.unit.is_published and part.unit.live == 1 else 0

    def give_up(self, part: StatePart) -> None:
        """Makes the running block private again where it is a checkpoint that no other sequence holds."""
        if self.let_go(part, 0):
            assert part.unit is not None
            blocks, part.scope.held = part.unit.blocks, part.scope.held - self.width
            unit = part.unit
            self._retract(unit)
            self._end_boundaries(unit)
            if unit in part.checkpoints:
                part.checkpoints.remove(unit)
            (part.unit,) = self._new_units(part.scope, blocks)

    def commit(self, part: StatePart, committed: int, until: int, digests: bytes, swaps: list[Swap]) -> None:
        """Makes a checkpoint, if `until` is where one belongs."""
        if part.unit is None or until == 0 or (until % self.block_size and until not in part.boundaries):
            return
        if not self._is_private(part):
            return
        digest = self._digest_at(digests, until, committed // self._digest_tokens)
        if not digest:
            return
        key = (until // self._digest_tokens, digest)
        own, part.unit = part.unit, self._publish(part.scope, part.unit, key, swaps, 0)
        if part.unit is own:
            cast(Checkpoint, own).place_behind(part.last)
            self._log.stored(part.scope, b"", digest, key[0])
            part.checkpoints.append(own)
        part.last = cast(Checkpoint, part.unit)

    def settle(self, part: StatePart, committed: int) -> int:
        """Drops checkpoints of this sequence beyond what it may leave behind."""
        self._trim(part)
        return NEVER

    def settled_until(self, part: StatePart, committed: int) -> int:
        return NEVER

    def fork(self, part: StatePart, committed: int) -> StatePart:
        """Shares the running block, which both sequences copy before they go on."""
        if part.unit is not None:
            part.unit.live += 1
        child = StatePart(part.scope, part.unit, part.boundaries)
        child.last = part.last
        return child

    def shrink(self, part: StatePart, until: int) -> None:
        """A state takes the same room at every length."""

    def free(self, part: StatePart) -> None:
        if part.unit is not None:
            self._leave(part, part.unit)

    def mark(self, states: BlockStates, scopes: Sequence[UnitScope], parts: Sequence[StatePart]) -> None:
        units = {part.unit for part in parts if part.unit is not None}
        units |= {unit for scope in scopes for unit in scope.units()}
        for unit in units:
            states.mark(unit.blocks, unit.live, published=unit.is_published)

    def tables(self, part: StatePart) -> list[array[int]]:
        blocks = part.unit.blocks if part.unit is not None else array("I")
        return [blocks[column : column + 1] for column in range(self.width)]

    def added(self, part: StatePart, blocks: array[int]) -> list[array[int]]:
        return [blocks[column : column + 1] for column in range(self.width)]

    def shared_token_count(self, part: StatePart) -> int:
        """Counts all its tokens if other sequences hold the same state, else none."""
        return NEVER if part.unit is not None and part.unit.live > 1 else 0

    def new_unit(self, scope: UnitScope, blocks: array[int]) -> Unit:
        return Checkpoint(scope, blocks)

    def _places(self, digests: bytes, kept_digest_count: int) -> Iterator[UnitKey]:
        for count in range(kept_digest_count + 1, len(digests) // DIGEST_BYTES + 1):
            yield count, digests[(count - 1) * DIGEST_BYTES : count * DIGEST_BYTES]

    def _is_private(self, part: StatePart) -> bool:
        """Tells whether the running block may be overwritten: it is neither shared nor published."""
        unit = part.unit
        return unit is not None and unit.live == 1 and not unit.is_published

    # -- what boundaries need ------------------------------------------------------------------------------------------

    def checkpoint_at(self, scope: UnitScope, token_count: int, digest: bytes) -> Unit | None:
        """Returns the checkpoint after so many tokens of that digest, whoever made it; None where there is none."""
        return scope.find(token_count // self._digest_tokens, digest)

    def checkpoints(self, scope: UnitScope) -> list[tuple[int, bytes]]:
        """Returns after how many tokens of which digest there are checkpoints."""
        return [(unit.first_position * self._digest_tokens, unit.first_digest) for unit in scope.units()]

    def own_checkpoints(self, part: StatePart) -> list[tuple[int, bytes]]:
        """Returns token counts and digests of the checkpoints that a sequence holds, or made and nobody has used; the
        deepest first."""
        keys = {unit.key for unit in part.checkpoints if unit.key is not None and not unit.was_hit}
        if part.unit is not None and part.unit.key is not None:
            keys.add(part.unit.key)
        return sorted([(position * self._digest_tokens, digest) for position, digest in keys], reverse=True)

    def replaced(self, unit: Unit) -> None:
        """Another checkpoint has taken the place of one: where nobody has asked for it, it is not worth its blocks."""
        if unit.is_published and not unit.live and not unit.was_hit and not unit.boundaries:
            self._drop(unit)

    # -- how many checkpoints are kept ---------------------------------------------------------------------------------

    def _leave(self, part: StatePart, unit: Unit) -> None:
        """The sequence lets go of its running block, which may be a checkpoint that others can hit from now on."""
        part.unit = None
        self._release(unit)
        if unit.is_published and not unit.live and not unit.was_hit and not self._is_at_boundary(part, unit):
            self._between[unit] = None
            if len(self._between) > self._between_max:
                self._drop(next(iter(self._between)))
        self._trim(part)
        if self.keeper is not None:
            self._trim_path(cast(Checkpoint, unit))

    def _trim(self, part: StatePart) -> None:
        """Drops checkpoints that this sequence left, until they are as few as they may be."""
        own = part.checkpoints
        if len(own) <= self._checkpoints_max:
            return
        own[:] = [unit for unit in own if unit.is_published and not unit.was_hit]
        while len(own) > self._checkpoints_max:
            unit = self._least_useful(part)
            if unit is part.unit:  # it is dropped when the sequence lets go of it
                return
            own.remove(unit)
            if not unit.live:  # else others go on from it
                self._drop(unit)

    def _trim_path(self, last: Checkpoint) -> None:
        """Drops what no boundary needs of a path, until there are as few checkpoints on it as there may be."""
        path = last.path()
        excess = len(path) - self._checkpoints_max
        for unit in reversed(path):
            if excess <= 0:
                return
            if not unit.live and not unit.needed_count and not unit.aside_count:
                self._drop(unit)
                excess -= 1

    def _least_useful(self, part: StatePart) -> Unit:
        """Returns the oldest checkpoint between boundaries; where there is none, the second one at a boundary."""
        for unit in part.checkpoints:
            if not self._is_at_boundary(part, unit):
                return unit
        return part.checkpoints[min(1, len(part.checkpoints) - 1)]

    def _is_at_boundary(self, part: StatePart, unit: Unit) -> bool:
        return unit.first_position * self._digest_tokens in part.boundaries

    def _hold(self, unit: Unit) -> None:
        self._between.pop(unit, None)
        super()._hold(unit)

    def _retract(self, unit: Unit) -> None:
        self._between.pop(unit, None)
        super()._retract(unit)
