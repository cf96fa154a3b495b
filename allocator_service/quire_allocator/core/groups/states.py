"""Groups of recurrent state (mamba, linear attention): one running block, and checkpoints that can be hit.

The running block holds the state after the committed tokens; every forward pass overwrites it in place. It becomes a
checkpoint by being published, when a commit leaves no granted token to compute, which would overwrite it unseen, and
ends exactly at

    a multiple of the group's block size, or
    the last block edge of all other groups in the prompt that leaves a token to compute.

As a published block never changes, the next grow replaces it by a copy; where there is no room for one, a checkpoint
that no other sequence holds is given up instead. So a hit is one block: the deepest checkpoint of the prefix. A
sequence leaves at most `checkpoints_max` unused ones behind: with one more, its oldest is dropped.

A table here has one entry, the running block.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence

from quire_allocator.core.block_states import BlockStates
from quire_allocator.core.blocks import Blocks
from quire_allocator.core.events import EventLog
from quire_allocator.core.groups.units import NO_UNITS, Unit, UnitHit, UnitManager, UnitScope
from quire_allocator.core.sequence import Part
from quire_allocator.core.spec import CHECKPOINTS_MAX_DEFAULT, DIGEST_BYTES, NEVER, Copy, GroupSpec, PoolSpec, Swap


class StatePart(Part):
    """What one sequence has here.

    Attributes:
        unit: the running block of each group; None before the first grow.
        prompt_end: tokens after which the prompt's own checkpoint is made; 0 for none.
        checkpoints: those it made, oldest first.
    """

    __slots__ = ("checkpoints", "prompt_end", "scope", "unit")

    def __init__(self, scope: UnitScope, unit: Unit | None) -> None:
        self.scope = scope
        self.unit = unit
        self.prompt_end = 0
        self.checkpoints: deque[Unit] = deque()


class StateManager(UnitManager[StatePart]):
    """All groups of one kind of state. `Manager` says what its methods promise."""

    in_place = True
    settles = True

    def __init__(self, spec: GroupSpec, groups: Sequence[int], pool: PoolSpec, blocks: Blocks, log: EventLog) -> None:
        super().__init__(spec, groups, pool, blocks, log)
        self._edge_tokens = pool.edge_tokens
        self._checkpoints_max = spec.checkpoints_max or CHECKPOINTS_MAX_DEFAULT

    def find(self, scope: UnitScope, digests: bytes, token_limit: int) -> UnitHit:
        """Returns the deepest checkpoint at or before `token_limit` tokens."""
        index = scope.index
        if index:
            for count in range(min(token_limit // self._digest_tokens, len(digests) // DIGEST_BYTES), 0, -1):
                unit = index.get((count, self._digest_at(digests, count * self._digest_tokens)))
                if unit is not None:
                    # The sequence holds no block of the hit: its first grow copies the checkpoint and lets go of it.
                    return UnitHit(count * self._digest_tokens, 0, 0 if unit.live else self.width, 0, [unit])
        return NO_UNITS

    def needed_after(self, hit: UnitHit, token_count: int) -> int:
        return self.width

    def open(self, scope: UnitScope, hit: UnitHit, prompt_token_count: int) -> StatePart:
        self._hold_hit(hit)
        part = StatePart(scope, hit.units[0] if hit.units else None)
        part.prompt_end = (prompt_token_count - 1) // self._edge_tokens * self._edge_tokens
        return part

    def needed(self, part: StatePart, token_count: int, until: int) -> int:
        return 0 if self._is_private(part) else self.width

    def footprint(self, part: StatePart, token_count: int) -> int:
        return self.width

    def peak(self, token_count: int, pass_token_count: int) -> int:
        return self.width

    def room(self, part: StatePart, token_count: int) -> int:
        """Any length, as long as the running block is the sequence's own."""
        return NEVER if self._is_private(part) else token_count

    def grow(self, part: StatePart, token_count: int, until: int, blocks: array[int], copies: list[Copy]) -> int:
        """Replaces a running block by a copy where it is a checkpoint, or shared."""
        if blocks:
            before, (part.unit,) = part.unit, self._new_units(part.scope, blocks)
            if before is not None:
                copies.extend(map(Copy, before.blocks, blocks))
                self._release(before)
        return NEVER

    def let_go(self, part: StatePart, token_count: int) -> int:
        """Counts the running block where it is a checkpoint that no other sequence holds."""
        return self.width if part.unit is not None and part.unit.key is not None and part.unit.live == 1 else 0

    def give_up(self, part: StatePart) -> None:
        """Makes the running block private again where it is a checkpoint that no other sequence holds."""
        if self.let_go(part, 0):
            assert part.unit is not None
            blocks, part.scope.held = part.unit.blocks, part.scope.held - self.width
            self._retract(part.unit)
            (part.unit,) = self._new_units(part.scope, blocks)

    def commit(self, part: StatePart, committed: int, until: int, digests: bytes, swaps: list[Swap]) -> None:
        """Makes a checkpoint, if `until` is where one belongs."""
        if part.unit is None or until == 0 or (until % self.block_size and until != part.prompt_end):
            return
        if not self._is_private(part):
            return
        digest = self._digest_at(digests, until, committed // self._digest_tokens)
        key = (until // self._digest_tokens, digest)
        own, part.unit = part.unit, self._publish(part.scope, part.unit, key, swaps, 0)
        if part.unit is own:
            self._log.stored(part.scope, b"", digest, key[0])
            part.checkpoints.append(own)

    def settle(self, part: StatePart, committed: int) -> int:
        """Drops this sequence's oldest checkpoints beyond what it may leave behind, those that were hit excepted."""
        while len(part.checkpoints) > self._checkpoints_max:
            oldest = part.checkpoints.popleft()
            if oldest.key is not None and not oldest.live and not oldest.was_hit:
                self._unpublish(oldest)
                self._blocks.dropped(oldest.scope, self.width)
        return NEVER

    def settled_until(self, part: StatePart, committed: int) -> int:
        return NEVER

    def fork(self, part: StatePart, committed: int) -> StatePart:
        """Shares the running block, which both sequences copy before they go on."""
        if part.unit is not None:
            part.unit.live += 1
        return StatePart(part.scope, part.unit)

    def shrink(self, part: StatePart, until: int) -> None:
        """A state takes the same room at every length."""

    def free(self, part: StatePart) -> None:
        if part.unit is not None:
            self._release(part.unit)

    def mark(self, states: BlockStates, scopes: Sequence[UnitScope], parts: Sequence[StatePart]) -> None:
        units = {part.unit for part in parts if part.unit is not None}
        units |= {unit for scope in scopes for unit in scope.index.values()}
        for unit in units:
            states.mark(unit.blocks, unit.live, published=unit.key is not None)

    def tables(self, part: StatePart) -> list[array[int]]:
        blocks = part.unit.blocks if part.unit is not None else array("I")
        return [blocks[column : column + 1] for column in range(self.width)]

    def added(self, part: StatePart, blocks: array[int]) -> list[array[int]]:
        return [blocks[column : column + 1] for column in range(self.width)]

    def shared_token_count(self, part: StatePart) -> int:
        """Counts all its tokens if other sequences hold the same state, else none."""
        return NEVER if part.unit is not None and part.unit.live > 1 else 0

    def _is_private(self, part: StatePart) -> bool:
        """Tells whether the running block may be overwritten: it is neither shared nor published."""
        unit = part.unit
        return unit is not None and unit.live == 1 and unit.key is None
