"""Sliding-window and chunked-local groups: blocks that fell out are given back, and leave null entries in the table.

Who owns which part of a sequence's table, in positions:

    [0, first)         no one: fallen out of the window; null entries
    [first, end)       `units`: published and shareable below the committed tokens, this sequence's alone beyond

Of what fell out, the sequence remembers what a boundary at its last edge would need, or have aside (`retention.py`).
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from quire_allocator.core.block_states import BlockStates
from quire_allocator.core.blocks import Blocks
from quire_allocator.core.events import EventLog
from quire_allocator.core.groups.units import NO_UNITS, Unit, UnitHit, UnitManager, UnitScope
from quire_allocator.core.groups.window_rules import WINDOW_RULES, WindowRule
from quire_allocator.core.sequence import Part
from quire_allocator.core.spec import DIGEST_BYTES, NULL_BLOCK, Copy, GroupSpec, PoolSpec, Swap


class WindowPart(Part):
    """What one sequence has here.

    Attributes:
        units: those in its table, from position `first` on.
        needed, aside: units that fell out, which a boundary at the last edge before the committed tokens would need,
            and which it would have aside.
    """

    __slots__ = ("aside", "first", "needed", "scope", "units")

    def __init__(self, scope: UnitScope, first: int, units: list[Unit]) -> None:
        self.scope = scope
        self.first = first
        self.units = units
        self.needed: list[Unit] = []
        self.aside: list[Unit] = []


class WindowManager(UnitManager[WindowPart]):
    """All groups of one window. `Manager` says what its methods promise."""

    settles = True

    def __init__(self, spec: GroupSpec, groups: Sequence[int], pool: PoolSpec, blocks: Blocks, log: EventLog) -> None:
        super().__init__(spec, groups, pool, blocks, log)
        self._rule: WindowRule = WINDOW_RULES[spec.kind](spec)
        self._stride = spec.block_size // pool.block_size
        self.edge_tokens = pool.edge_tokens

    def find(self, scope: UnitScope, digests: bytes, token_limit: int) -> UnitHit:
        """Returns the longest prefix of at most `token_limit` tokens whose window is published; it searches from the
        right.

        Of each window the first position is looked at first: where it lacks, no window that has it is complete, so
        that a prompt of 62,500 blocks with nothing published takes 977 looks if a window has 64 blocks.
        """
        index, size, digest_tokens = scope.index, self.block_size, self._digest_tokens
        step = self._stride * DIGEST_BYTES
        end = min(token_limit, len(digests) // DIGEST_BYTES * digest_tokens) // size
        while end > 0:
            first = self._rule.first_needed(end * size) // size
            units: list[Unit] = []
            for position in range(first, end):
                stop = (position + 1) * step
                unit = index.get((position, digests[stop - DIGEST_BYTES : stop]))
                if unit is None:
                    end = position
                    break
                units.append(unit)
            else:
                cached = sum([not unit.live for unit in units])
                return UnitHit(end * size, len(units) * self.width, cached * self.width, first, units)
        return NO_UNITS

    def needed_after(self, hit: UnitHit, token_count: int) -> int:
        return (-(-token_count // self.block_size) - hit.token_count // self.block_size) * self.width

    def open(self, scope: UnitScope, hit: UnitHit, boundaries: tuple[int, ...]) -> WindowPart:
        self._hold_hit(hit)
        return WindowPart(scope, hit.first, list(hit.units))

    def needed(self, part: WindowPart, token_count: int, until: int) -> int:
        missing = -(-until // self.block_size) - part.first - len(part.units)
        return self.width * (missing + self._must_copy(part, token_count))

    def footprint(self, part: WindowPart, token_count: int) -> int:
        return max(0, -(-token_count // self.block_size) - part.first) * self.width

    def peak(self, token_count: int, pass_token_count: int) -> int:
        at_once = self._rule.past_token_count() + pass_token_count
        return min(-(-token_count // self.block_size), -(-(at_once - 1) // self.block_size) + 1) * self.width

    def room(self, part: WindowPart, token_count: int) -> int:
        if self._must_copy(part, token_count):
            return token_count
        return (part.first + len(part.units)) * self.block_size

    def grow(self, part: WindowPart, token_count: int, until: int, blocks: array[int], copies: list[Copy]) -> int:
        units = self._new_units(part.scope, blocks)
        if token_count % self.block_size and self._must_copy(part, token_count):
            shared = part.units.pop()
            copies.extend(map(Copy, shared.blocks, units[0].blocks))
            self._release(shared)
        part.units += units
        return (part.first + len(part.units)) * self.block_size

    def let_go(self, part: WindowPart, token_count: int) -> int:
        """Counts the half-filled block where another sequence has filled, published and left it."""
        return self.width if self._must_copy(part, token_count) and part.units[-1].live == 1 else 0

    def give_up(self, part: WindowPart) -> None:
        """Forward passes never overwrite a published block here."""

    def commit(self, part: WindowPart, committed: int, until: int, digests: bytes, swaps: list[Swap]) -> None:
        """Publishes the positions that became full, and tells the log of new ones that follow one another at once."""
        step = self._stride * DIGEST_BYTES
        scope, position, new = part.scope, 0, list[bytes]()
        end = (committed // self.block_size + 1) * step - committed // self._digest_tokens * DIGEST_BYTES
        for position in range(committed // self.block_size, until // self.block_size):
            i = position - part.first
            digest, own = digests[end - DIGEST_BYTES : end], part.units[i]
            unit = part.units[i] = self._publish(scope, own, (position, digest), swaps, position)
            if unit is own:
                new.append(digest)
            elif new:
                self._log.stored(scope, b"", b"".join(new), position - len(new))
                new = []
            end += step
        if new:
            self._log.stored(scope, b"", b"".join(new), position + 1 - len(new))

    def settle(self, part: WindowPart, committed: int) -> int:
        """Gives back what fell out, the deepest block first: the cache loses it first, and short prefixes serve most
        prompts."""
        gone = self._rule.first_needed(committed) // self.block_size - part.first
        if gone > 0:
            if self.keeper is not None:
                self._remember(part, committed, gone)
            for i in range(gone - 1, -1, -1):
                self._release(part.units[i])
            del part.units[:gone]
            part.first += gone
        elif part.needed or part.aside:
            self._remember(part, committed, 0)
        return self.settled_until(part, committed)

    def settled_until(self, part: WindowPart, committed: int) -> int:
        """Returns committed tokens at which the first block of the table falls out."""
        return self._rule.needs_less_at(committed, (part.first + 1) * self.block_size - 1)

    def fork(self, part: WindowPart, committed: int) -> WindowPart:
        units = part.units[: -(-committed // self.block_size) - part.first]
        for unit in units:
            unit.live += 1
        child = WindowPart(part.scope, part.first, units)
        for unit in part.needed:
            unit.needed_count += 1
        for unit in part.aside:
            unit.aside_count += 1
        child.needed, child.aside = part.needed[:], part.aside[:]
        return child

    def shrink(self, part: WindowPart, until: int) -> None:
        keep = max(0, -(-until // self.block_size) - part.first)
        while len(part.units) > keep:
            self._release(part.units.pop())

    def free(self, part: WindowPart) -> None:
        for unit in reversed(part.units):
            self._release(unit)
        for unit in part.aside:
            unit.aside_count -= 1
            self.revalue(unit)
        for unit in part.needed:
            unit.needed_count -= 1
            self.revalue(unit)

    # -- what boundaries need ------------------------------------------------------------------------------------------

    def needed_at(self, token_count: int) -> range:
        """Returns the positions that a hit of so many tokens takes."""
        return range(self._rule.first_needed(token_count) // self.block_size, token_count // self.block_size)

    def aside_at(self, token_count: int) -> range:
        """Returns the positions that a hit takes which ends one edge earlier, those of `needed_at` excepted."""
        earlier = max(0, token_count - self.edge_tokens)
        first = self._rule.first_needed(earlier) // self.block_size
        return range(first, min(earlier // self.block_size, self._rule.first_needed(token_count) // self.block_size))

    def tail(self, part: WindowPart, positions: range) -> list[Unit]:
        """Returns the units of a sequence at these positions, as far as they are published and it has or remembers
        them."""
        first, units, found = part.first, part.units, list[Unit]()
        if positions and positions.start < first:
            fallen = [*part.aside, *part.needed]
            found = [unit for unit in fallen if unit.key is not None and unit.key[0] in positions]
        found += [units[position - first] for position in positions if first <= position]
        return [unit for unit in found if unit.key is not None]

    def digest_at(self, part: WindowPart, token_count: int) -> bytes:
        """Returns the digest of so many tokens of a sequence; empty where it lacks the block before."""
        position = token_count // self.block_size - 1
        found = self.tail(part, range(position, position + 1))
        return found[0].first_digest if found else b""

    def _remember(self, part: WindowPart, committed: int, gone: int) -> None:
        """Notes what is needed of the first `gone` units, which are about to fall out, and of those before them."""
        edge = committed // self.edge_tokens * self.edge_tokens
        needed, aside = self.needed_at(edge), self.aside_at(edge)
        before = [*part.aside, *part.needed]
        old_needed, old_aside = part.needed, part.aside
        fallen = before + part.units[:gone]
        part.needed = [unit for unit in fallen if unit.key is not None and unit.key[0] in needed]
        part.aside = [unit for unit in fallen if unit.key is not None and unit.key[0] in aside]
        for unit in part.needed:
            unit.needed_count += 1
        for unit in part.aside:
            unit.aside_count += 1
        for unit in old_needed:
            unit.needed_count -= 1
        for unit in old_aside:
            unit.aside_count -= 1
        for unit in before:
            self.revalue(unit)

    def mark(self, states: BlockStates, scopes: Sequence[UnitScope], parts: Sequence[WindowPart]) -> None:
        units = {unit for part in parts for unit in part.units}
        units |= {unit for scope in scopes for unit in scope.index.values()}
        for unit in units:
            states.mark(unit.blocks, unit.live, published=unit.key is not None)

    def tables(self, part: WindowPart) -> list[array[int]]:
        nulls = array("I", [NULL_BLOCK]) * part.first
        return [nulls + array("I", (unit.blocks[column] for unit in part.units)) for column in range(self.width)]

    def added(self, part: WindowPart, blocks: array[int]) -> list[array[int]]:
        return [blocks[column :: self.width] for column in range(self.width)]

    def shared_token_count(self, part: WindowPart) -> int:
        """Counts all its tokens if other sequences hold its whole window, else none."""
        if all(unit.live > 1 for unit in part.units):
            return (part.first + len(part.units)) * self.block_size
        return 0

    def _must_copy(self, part: WindowPart, token_count: int) -> bool:
        """Tells whether the next token falls into a block that is shared or published, and so not to be written."""
        position, offset = divmod(token_count, self.block_size)
        if not offset or position != part.first + len(part.units) - 1:
            return False
        unit = part.units[-1]
        return unit.live > 1 or unit.key is not None
