"""Sliding-window and chunked-local groups give back blocks that fell out, and leave null entries in the table.

Who owns which part of a sequence's table, in positions:

    [0, first)         no one: fallen out of the window; null entries
    [first, tail)      `units`: published and shareable; the last one may be half-filled, and shared with forks
    [tail, end)        `tail`: granted; only this sequence writes it

In an append-only pool the table keeps the sequence's own blocks at some published positions (`kept.py`). A sequence
remembers the fallen units that a hit at its last edge would take.

A commit may publish far more than the window holds. The manager makes units only where hits should end, or where a unit
is already published. The rest becomes stretches, which no sequence holds after the commit (`fallen.py`).
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Sequence

from quire_allocator.core.block_states import BlockStates
from quire_allocator.core.events import EventLog
from quire_allocator.core.groups.fallen import Fallen, Path, WindowScope, is_idle, spans_between
from quire_allocator.core.groups.kept import KeptBlocks
from quire_allocator.core.groups.manager import Commit, IndexedStretch
from quire_allocator.core.groups.units import UnitManager
from quire_allocator.core.groups.window_parts import WindowPart
from quire_allocator.core.groups.window_rules import WINDOW_RULES, WindowRule
from quire_allocator.core.groups.window_search import WindowHit, WindowSearch
from quire_allocator.core.retention.retention import Retention
from quire_allocator.core.retention.stop import Unit, UnitKey
from quire_allocator.core.scopes import Namespace, Scoped
from quire_allocator.core.spec import DIGEST_BYTES, NO_BLOCKS, Copy, GroupSpec, PoolSpec, Swap
from quire_allocator.core.stretches import Stretch, filled


class WindowManager(UnitManager[WindowScope, WindowHit, WindowPart]):
    """All groups of one window. The base class `Manager` documents the methods."""

    settles = True

    def __init__(
        self, spec: GroupSpec, groups: Sequence[int], pool: PoolSpec, log: EventLog, retention: Retention
    ) -> None:
        super().__init__(spec, groups, pool, log, retention)
        self._rule: WindowRule = WINDOW_RULES[spec.kind](spec)
        self._fallen = Fallen(self.width, log, retention)
        self._remembers = not retention.is_even  # whether sequences remember fallen units for a hit at the last edge
        # A token at a multiple of this many positions needs no earlier position. 0 if every token needs some.
        reset = self._rule.reset_token_count()
        self._reset_positions = math.lcm(reset, spec.block_size) // spec.block_size

    def new_scope(self, namespace: Namespace) -> WindowScope:
        return WindowScope(namespace, self)

    def find(self, scope: WindowScope, digests: bytes, token_limit: int) -> WindowHit:
        end = min(token_limit, len(digests) // DIGEST_BYTES * self._digest_tokens) // self.block_size
        path = Path(digests, self._stride * DIGEST_BYTES, 0)
        hit = WindowSearch(scope, path, end).find(self._rule, self.block_size, self._reset_positions)
        hit.count_blocks(self.width)
        return hit

    def needed_after(self, hit: WindowHit, token_count: int) -> int:
        return (-(-token_count // self.block_size) - hit.token_count // self.block_size) * self.width

    def open(self, scope: WindowScope, hit: WindowHit) -> WindowPart:
        units = hit.units
        if hit.places:
            taken = [unit for place in hit.places for unit in self._fallen.cut(scope, *place)]
            hit.units = units = sorted([*units, *taken], key=lambda unit: unit.first_position)
        self._hold_hit(hit)
        return WindowPart(scope, hit.first, units[:])

    def needed(self, part: WindowPart, token_count: int, until: int) -> int:
        missing = -(-until // self.block_size) - part.end(self.width)
        return self.width * (missing + self._must_copy(part, token_count))

    def footprint(self, part: WindowPart, token_count: int) -> int:
        return max(0, -(-token_count // self.block_size) - part.first) * self.width

    def peak(self, token_count: int, pass_token_count: int) -> int:
        at_once = self._rule.block_count_max(pass_token_count, self.block_size)
        return min(-(-token_count // self.block_size), at_once) * self.width

    def room(self, part: WindowPart, token_count: int) -> int:
        if self._must_copy(part, token_count):
            return token_count
        return part.end(self.width) * self.block_size

    def grow(self, part: WindowPart, token_count: int, until: int, blocks: array[int], copies: list[Copy]) -> int:
        if token_count % self.block_size and self._must_copy(part, token_count):
            shared = part.units.pop()
            copies.extend(map(Copy, shared.blocks, blocks))
            self._release(shared)
        part.add(blocks)
        return part.end(self.width) * self.block_size

    def append_row(self, part: WindowPart, blocks: array[int], first: int) -> None:
        part.add(blocks[first : first + self.width])

    def replaced_count(self, part: WindowPart, token_count: int) -> int:
        """Counts the half-filled block if another sequence has filled and published it, and no longer holds it."""
        return self.width if self._must_copy(part, token_count) and part.units[-1].live == 1 else 0

    def commit(self, part: WindowPart, new: Commit) -> None:
        """Publishes the positions that became full. Consecutive new ones are one event of the log."""
        size, width, scope = self.block_size, self.width, part.scope
        committed, until, swaps = new.committed, new.until, new.swaps
        begin, end = committed // size, until // size
        if begin == end:
            return
        stay = self._rule.first_needed(until) // size
        digests = new.digests if self._stride == 1 else filled(new.digests, self._stride, committed, size)
        named = begin + len(digests) // DIGEST_BYTES  # positions from `named` on have no digest, and stay private
        is_next = end - begin == 1 == named - begin and part.first < begin and stay <= begin
        if is_next and not (scope.stretches and scope.starts.has(begin)):
            self._commit_next(part, begin, digests, swaps)
            return
        path = Path(digests, DIGEST_BYTES, begin)
        self._take_out(part, path, named)
        units, blocks, taken = part.units, part.tail, 0
        half = units.pop() if begin - part.first < len(units) else None  # the unit that was half-filled until now
        falling: list[Scoped] = []
        spans: list[range] = []
        if stay > begin:
            falling.extend(units)
            units.clear()
            part.first = stay
            last = min(stay, named)
            spans = self._idle_spans(part, path, range(begin + (half is not None), last), (*new.ends, until))
        told = position = begin  # positions before `told` are already in the log
        for span in (*spans, range(end, end)):
            while position < span.start:
                if half is not None:
                    unit, half = half, None
                else:
                    unit = Unit(scope, blocks[taken : taken + width])
                    taken += width
                key = (position, path.at(position)) if position < named else None
                published = unit if key is None else self._publish_own(part, unit, key, swaps)
                if published is not unit:
                    self._tell(scope, path, told, position)
                    told = position + 1
                if position < stay:
                    falling.append(published)
                else:
                    units.append(published)
                position += 1
            if len(span):
                own = blocks[taken : taken + len(span) * width]
                falling.append(Stretch(scope, position, path.between(position, span.stop), own))
                taken += len(span) * width
                position = span.stop
        part.falling = tuple(falling)
        del blocks[:taken]
        self._tell(scope, path, told, named)

    def _take_out(self, part: WindowPart, path: Path, end: int) -> None:
        """Turns a path's positions before `end` that are in stretches into units, about to be published."""
        begin = path.begin
        for unit in self._fallen.take_out(part.scope, path, begin, end, is_linked=part.first < begin):
            if unit.first_digest != path.at(unit.first_position):  # true only if the owner invented digests
                self._blocks.push(unit)

    def _commit_next(self, part: WindowPart, position: int, digest: bytes, swaps: list[Swap]) -> None:
        """Publishes one position after others of the sequence, as decoding does. No stretch may begin there."""
        units, blocks, width, scope = part.units, part.tail, self.width, part.scope
        if position - part.first < len(units):  # the unit was half-filled until now
            unit = units.pop()
        elif len(blocks) == width:
            unit, part.tail = Unit(scope, blocks), NO_BLOCKS
        else:
            unit = Unit(scope, blocks[:width])
            del blocks[:width]
        if self._append_only:
            published = self._publish_own(part, unit, (position, digest), swaps)
        else:
            published = self._publish(scope, unit, (position, digest), swaps, position)
        units.append(published)
        if published is unit:
            self._log.stored(scope, b"", digest, position)

    def _idle_spans(self, part: WindowPart, path: Path, new: range, ends: tuple[int, ...]) -> list[range]:
        """Returns the `new` positions that no expected hit needs and that are not published yet, as ranges."""
        size, scope = self.block_size, part.scope
        apart = [
            range(position, position + 1)
            for position in scope.depths.between(new.start, new.stop)
            if scope.find(position, path.at(position)) is not None
        ]
        if self._remembers:
            for end in ends:
                edge = end // self._edge_tokens * self._edge_tokens
                apart += [self.needed_at(edge), range(edge // size - 1, edge // size)]
        return spans_between(new, apart)

    def _tell(self, scope: WindowScope, path: Path, first: int, end: int) -> None:
        """Adds new positions [first, end) of a path to the log."""
        if first < end:
            self._log.stored(scope, b"", path.between(first, end), first)

    def _publish_own(self, part: WindowPart, unit: Unit, key: UnitKey, swaps: list[Swap]) -> Unit:
        """Publishes a private unit with its key. Returns the unit to use from now on: the key's published one, if any.
        In an append-only pool, a cached unit takes over the blocks. Beside a held unit, the sequence keeps its own."""
        other = part.scope.find(key[0], key[1]) if self._append_only else None
        if other is None:
            return self._publish(part.scope, unit, key, swaps, key[0])
        own, position = unit.blocks, key[0]
        if other.live:
            swaps.extend(Swap(group, position, block) for group, block in zip(self.groups, other.blocks))
            part.kept = part.kept or KeptBlocks()
            part.kept.add(position, own, self.width)
            self._hold(other)
        else:
            self._hold(other)
            self._give_back(part.scope, other.blocks)
            other.blocks = own
        return other

    def take_over(self, part: WindowPart) -> int | None:
        if part.kept is None:
            return None
        width, first = self.width, part.first_alone(self.width)
        taken = part.kept.take_from(first, width)
        for position, own in taken:
            returned = NO_BLOCKS[:]
            for start in range(0, len(own), width):
                unit = part.units[position - part.first + start // width]
                returned.extend(unit.blocks)
                unit.blocks = own[start : start + width]
            self._give_back(part.scope, returned)
        return first if taken else None

    def _let_fall(self, scope: WindowScope, fallen: Sequence[Scoped]) -> None:
        """Counts one fewer table for these consecutive units and stretches."""
        if len(fallen) == 1 and isinstance(fallen[0], Unit):  # a single unit, as usual while decoding
            self._release(fallen[0])
            return
        i = len(fallen)
        while i > 0:  # the deepest entries fall first, because short prefixes serve most prompts
            end = i
            while i > 0 and is_idle(fallen[i - 1]):
                i -= 1
            if end - i > 1:
                self._fallen.cache(scope, self._fallen.stretch(scope, fallen[i:end]))
                continue
            i = end - 1
            entry = fallen[i]
            if isinstance(entry, Unit):
                self._release(entry)
            elif isinstance(entry, Stretch):
                self._fallen.cache(scope, entry)

    def settle(self, part: WindowPart, committed: int) -> int:
        """Gives back blocks that fell out, the deepest first, because short prefixes serve most prompts."""
        first = part.first
        gone = self._rule.first_needed(committed) // self.block_size - first
        falling = part.falling
        if part.kept is not None:
            for own in part.kept.take_before(part.first + max(gone, 0), self.width):
                self._give_back(part.scope, own)
        if gone == 1 and not (falling or part.needed) and part.units and not self._is_needed(part, first, committed):
            part.first = first + 1
            self._release(part.units.pop(0))  # a single unit, as usual while decoding
            return self._rule.needs_less_at(committed, (first + 2) * self.block_size - 1)
        if gone > 0:
            fallen: list[Scoped] = [*part.units[:gone]]
            falling = (*falling, *fallen)
            del part.units[:gone]
            part.first += gone
        if falling:
            part.falling = falling
            if self._remembers:
                self._remember(part, committed)
            part.falling = ()
            self._let_fall(part.scope, falling)
        elif part.needed:
            self._remember(part, committed)
        return self.settled_until(part, committed)

    def settled_until(self, part: WindowPart, committed: int) -> int:
        """Returns the committed tokens at which the table's first block falls out."""
        return self._rule.needs_less_at(committed, (part.first + 1) * self.block_size - 1)

    def fork(self, part: WindowPart, committed: int) -> WindowPart:
        count = -(-committed // self.block_size) - part.first
        if count > len(part.units):  # parent and child share the half-filled block from now on
            part.units.append(Unit(part.scope, part.tail[: self.width]))
            del part.tail[: self.width]
        child = WindowPart(part.scope, part.first, part.units[:count])
        for unit in child.units:
            unit.live += 1
        child.needed = part.needed
        self._retention.need(child.needed, ())
        return child

    def shrink(self, part: WindowPart, until: int) -> None:
        keep = max(0, -(-until // self.block_size) - part.first - len(part.units)) * self.width
        if keep < len(part.tail):
            self._give_back(part.scope, part.tail[keep:])
            del part.tail[keep:]

    def free(self, part: WindowPart) -> None:
        if part.tail:
            self._give_back(part.scope, part.tail)
        if part.kept is not None:
            for _, own in part.kept.take_from(0, self.width):
                self._give_back(part.scope, own)
        self._let_fall(part.scope, part.units)
        self._retention.need((), part.needed)

    def needed_at(self, token_count: int) -> range:
        """Returns the positions that a hit of `token_count` tokens takes."""
        return range(self._rule.first_needed(token_count) // self.block_size, token_count // self.block_size)

    def units_at(self, part: WindowPart, token_count: int, digest: bytes) -> list[Unit] | None:
        wanted = self.needed_at(token_count)
        found = part.published(wanted)
        return found if len(found) == len(wanted) else None

    def digest_at(self, part: WindowPart, token_count: int) -> bytes:
        position = token_count // self.block_size - 1
        found = part.published(range(position, position + 1))
        return found[0].first_digest if found else b""

    def _is_needed(self, part: WindowPart, position: int, committed: int) -> bool:
        """Tells whether a hit at the last edge would take a position that falls out."""
        return self._remembers and position in self.needed_at(self.last_end(part, committed))

    def _remember(self, part: WindowPart, committed: int) -> None:
        """Notes the units, fallen or about to fall out, that a hit at the last edge would take."""
        needed, before = self.needed_at(self.last_end(part, committed)), part.needed
        part.needed = tuple([unit for unit in part.fallen() if unit.first_position in needed])
        self._retention.need(part.needed, before)

    def walk(self, scope: WindowScope) -> Iterator[IndexedStretch]:
        noted = [(stretch.first_position, bytes(stretch.digests)) for stretch in scope.stretches.values()]
        # While this iterates, units may become stretches, and stretches units. This yields all blocks that it noted at
        # the start, and the log has the removals.
        noted += [(unit.first_position, unit.first_digest) for unit in scope.units()]
        for position, digests in noted:
            yield IndexedStretch(scope.namespace.name, self.groups, self.spec, b"", digests, position)

    def evict(self, entry: Scoped, wanted: int) -> int:
        if not isinstance(entry, Stretch):
            return super().evict(entry, wanted)
        assert isinstance(entry.scope, WindowScope)
        return self._fallen.evict(entry.scope, entry, wanted)

    def drop_path(self, scope: WindowScope, digests: bytes, kept_digest_count: int) -> None:
        path = Path(digests, self._stride * DIGEST_BYTES, 0)
        first, end = kept_digest_count // self._stride, len(digests) // path.step
        for unit in self._fallen.take_out(scope, path, first, end, is_linked=False):
            self._drop(unit)
        super().drop_path(scope, digests, kept_digest_count)

    def mark(self, states: BlockStates, scopes: Sequence[WindowScope], parts: Sequence[WindowPart]) -> None:
        units = {unit for part in parts for unit in part.units}
        units |= {unit for scope in scopes for unit in scope.units()}
        for unit in units:
            states.mark(unit.blocks, unit.live, published=unit.is_published)
        for scope in scopes:
            for stretch in scope.stretches.values():
                states.mark(stretch.blocks, 0, published=True)
        for part in parts:
            states.mark(part.tail, 1, published=False)
            for _, own in part.kept or ():
                states.mark(own, 1, published=False)

    def tables(self, part: WindowPart) -> list[array[int]]:
        return part.tables(self.width)

    def shared_token_count(self, part: WindowPart) -> int:
        """Counts all tokens of the sequence if other sequences hold its whole window, else none."""
        if not part.tail and all(unit.live > 1 for unit in part.units):
            return (part.first + len(part.units)) * self.block_size
        return 0

    def _must_copy(self, part: WindowPart, token_count: int) -> bool:
        """Tells whether the next token falls into a shared or published block, which must not be written."""
        return token_count % self.block_size > 0 and part.is_shared(token_count // self.block_size)
