"""Retention of windows and states; the twin looks at every stop and every slot."""

from __future__ import annotations

from collections.abc import Sequence

from tests.allocator.twin.kinds import Kind
from tests.allocator.twin.partings import STEP_COUNT, TwinPartings
from tests.allocator.twin.state import Slot, TwinSequence, TwinState, TwinStop

SPARE, ASIDE, RANKED, LED = 0, 1, 2, 3
CONTINUED_MAX = 3


class TwinRetention:
    """The stops of a pool, and the worth that they give to slots."""

    def __init__(self, pool: TwinState) -> None:
        self.pool = pool
        self.partings = TwinPartings(pool)

    def edge_before(self, token_count: int) -> int:
        """Returns the last edge at or before `token_count`; -1 if that is negative."""
        return max(
            [end for end in range(0, token_count + 1, self.pool.digest_tokens) if self.pool.is_edge(end)], default=-1
        )

    def is_gone(self, stop: TwinStop) -> bool:
        return stop not in self.pool.stops

    def before(self, stop: TwinStop | None) -> TwinStop | None:
        """Returns the stop itself, or the next one before it that is not gone."""
        while stop is not None and self.is_gone(stop):
            stop = stop.parent
        return stop

    def ways(self, stop: TwinStop) -> list[TwinStop]:
        """Returns the stops that directly follow a stop."""
        return [other for other in self.pool.stops if self.before(other.parent) is stop]

    def is_continued(self, stop: TwinStop) -> bool:
        return bool(self.ways(stop)) and not stop.is_parting

    # -- what is worth how much ----------------------------------------------------------------------------------------

    def worth(self, slot: Slot) -> int:
        """Returns the worth of a cached slot. The slot worth least is evicted first."""
        kind = self.pool.kinds[slot.kind]
        if self.pool.is_dense:
            return RANKED
        if kind.name == "full_attention":
            return RANKED if self._serves(slot) else SPARE
        needed, aside = False, False
        for stop in self.pool.stops:
            if slot in stop.needed:
                needed |= not stop.is_aside
                aside |= stop.is_aside
        needed |= any(slot in sequence.needed for sequence in self.pool.sequences.values())
        kept = LED if any(other.name == "full_attention" for other in self.pool.kinds) else RANKED
        return kept if needed else ASIDE if aside else SPARE

    def _serves(self, slot: Slot) -> bool:
        """Returns whether the other kinds can serve a hit that ends at a block of full attention or behind it."""
        assert slot.key is not None
        number, namespace, _, path = slot.key
        for stop in self.pool.stops:
            for key in stop.path:
                if key[:2] == (number, namespace) and key[3][: len(path)] == path:
                    return True
        return False

    # -- how stops come and go ------------------------------------------------------------------------------------

    def set_stops(
        self,
        sequence: TwinSequence,
        digests: Sequence[bytes],
        length: int,
        prompt: int,
        junction: int,
        *,
        breakpoints: Sequence[int],
    ) -> tuple[int, ...]:
        """Sets the stops of a new sequence. Its first `length` tokens are published, and the prompt diverges after
        them. Its owner has breakpoints.
        """
        end = sequence.prompt_end = self.edge_before(prompt - 1)
        if all(kind.keeps_prefixes for kind in self.pool.kinds):
            return ()
        self.partings.note_parting(sequence.namespace, digests, length, self.pool.stops, is_whole=length == end)
        sequence.early_stop = self.partings.early_end(end, length)
        stops = {
            end,
            self.edge_before(junction),
            sequence.early_stop,
            *self.partings.answer_ends(prompt),
            *self.partings.steps_before(end),
            *[edge for edge in map(self.edge_before, breakpoints) if sequence.committed < edge < end],
        }
        sequence.stops = sorted(stops - {0})
        return tuple(sequence.stops)

    def make(self, sequence: TwinSequence, token_count: int) -> None:
        """Makes a stop after `token_count` tokens, if the sequence has the blocks that a hit there takes."""
        if self.pool.is_dense:
            return
        end = [self.own(sequence, number, token_count // kind.block_size - 1) for number, kind in self._attention()]
        end += [] if end else [s for s in self.checkpoints(sequence) if self.length(s) == token_count]
        first = end[0] if end else None
        if first is None or first.key is None:
            return
        found = [b for b in self.pool.stops if b.namespace == sequence.namespace and b.token_count == token_count]
        known = [b for b in found if b.digest == first.key[3][-1]]
        if not known:
            stop = self._gather(sequence, token_count, first.key[3][-1])
            if stop is None:
                return
            parent = self.before(sequence.stop)
            early = parent if parent and parent.is_early and not parent.is_parting else None
            stop.parent, stop.is_early = parent, token_count == sequence.early_stop
            self.pool.stops.append(stop)
            known = [stop]
            stop.is_parting = any(self._parts(sequence, slot, token_count) for slot in end if slot is not None)
            if parent is not None:
                self._part(parent)
            if early:
                self._take_place_of(early, stop)
            if sequence.stops and sequence.stops[-1] > sequence.prompt_end and token_count > sequence.prompt_end:
                stop.answer = token_count - sequence.prompt_end
                self._go_on_from(parent, sequence.prompt_end)
        sequence.stop = known[0]
        self._end_old(known[0])

    def _take_place_of(self, early: TwinStop, stop: TwinStop) -> None:
        """Moves the stops right after an early end to the new stop, if it is on their path."""
        whole = stop.path[0][3]
        moved = [b for b in self.ways(early) if b is not stop and b.path[0][3][: len(whole)] == whole]
        for other in moved:
            other.parent = stop
        if moved:
            self.pool.replaced_count += 1
            self._part(stop)
            self.end(early)

    def _go_on_from(self, before: TwinStop | None, prompt_end: int) -> None:
        """Replaces the previous stop by one of the answer, unless paths part there."""
        if before is None or before.token_count < prompt_end or not self.is_continued(before):
            return
        self.pool.answered_count += 1
        self.end(before)
        for slot in before.needed if before.answer else ():
            is_wanted = any(slot in other.needed for other in self.pool.stops)
            is_idle = slot.key is not None and not self.pool.is_held(slot) and not slot.hits
            if self.pool.kinds[slot.kind].name == "state" and is_idle and not is_wanted and not slot.keep_until:
                self.pool.empty += slot.blocks[::-1]
                path = slot.key[3]
                self.unpublish(slot)
                self.slot_left(slot, path)

    def last_end(self, sequence: TwinSequence) -> int:
        """Returns the sequence's last edge, in tokens, where a hit can end."""
        if not any(kind.name == "state" for kind in self.pool.kinds):
            return self.edge_before(sequence.committed)
        lengths = [self.length(slot) for slot in self.checkpoints(sequence)]
        return max([length for length in lengths if self.pool.is_edge(length)], default=0)

    def turn_ended(self, sequence: TwinSequence) -> None:
        edge, last = self.last_end(sequence), self.before(sequence.stop)
        if edge > (0 if last is None else last.token_count):
            self.make(sequence, edge)

    def end(self, stop: TwinStop) -> None:
        """Ends a stop, so that no hit can end there."""
        if self.is_gone(stop):
            return
        self.pool.stops.remove(stop)
        before = self.before(stop)
        if before is not None:
            self._part(before)

    def slot_left(self, slot: Slot, path: tuple[bytes, ...]) -> None:
        """Ends the stops that need a slot which was published with `path` and is now evicted."""
        for stop in list(self.pool.stops):
            if slot in stop.needed:
                self.end(stop)
            for number, namespace, _, whole in stop.path:
                if (number, namespace) == (slot.kind, slot.namespace) and whole[: len(path)] == path:
                    self.end(stop)

    def remember(self, sequence: TwinSequence, number: int, falling: list[Slot]) -> None:
        """Remembers the blocks, fallen or about to fall out, that a hit at the last edge needs, and forgets all
        others."""
        if self.pool.is_dense:
            return
        kind, edge = self.pool.kinds[number], self.edge_before(sequence.committed)
        own = [slot for slot in sequence.needed if slot.kind == number] + falling
        needed = [slot for slot in own if slot.key is not None and slot.key[2] in kind.takes(edge)]
        sequence.needed = [slot for slot in sequence.needed if slot.kind != number] + needed

    def forget(self, sequence: TwinSequence, number: int) -> None:
        """Forgets the blocks that a sequence needed, because it ends."""
        sequence.needed = [slot for slot in sequence.needed if slot.kind != number]

    def unpublish(self, slot: Slot) -> None:
        """Removes a slot from the published ones."""
        if self.pool.leaving is not None:
            assert slot.key is not None
            assert self.pool.leaving.popleft() == (*slot.key[:3], slot.key[3][-1])
        self.pool.published.remove(slot)
        slot.key, slot.keep_until = None, 0

    def _attention(self) -> list[tuple[int, Kind]]:
        return [(number, kind) for number, kind in enumerate(self.pool.kinds) if kind.name != "state"]

    def checkpoints(self, sequence: TwinSequence) -> list[Slot]:
        """Returns the state of the first kind that a sequence made or hit last, if it is still there."""
        number = next(number for number, kind in enumerate(self.pool.kinds) if kind.name == "state")
        slot = sequence.last.get(number)
        return [slot] if slot is not None and slot.key is not None else []

    def length(self, slot: Slot) -> int:
        """Counts the tokens before a checkpoint."""
        assert slot.key is not None
        return slot.key[2] * self.pool.digest_tokens

    def own(self, sequence: TwinSequence, number: int, position: int) -> Slot | None:
        """Returns the sequence's slot at a position, even if it fell out and can still be named."""
        table = sequence.tables[number]
        slot = table[position] if position < len(table) else None
        if slot is not None:
            return slot.twin or slot
        fallen = [s for s in sequence.needed if s.kind == number and s.key is not None]
        found = [s for s in fallen if s.key is not None and s.key[2] == position]
        return found[0] if found else None

    def _gather(self, sequence: TwinSequence, token_count: int, digest: bytes) -> TwinStop | None:
        path, needed = [], list[Slot]()
        for number, kind in enumerate(self.pool.kinds):
            if kind.name == "full_attention":
                slot = self.own(sequence, number, token_count // kind.block_size - 1)
                assert slot is not None
                assert slot.key is not None
                path.append(slot.key)
            if kind.is_windowed:
                wanted = [self.own(sequence, number, position) for position in kind.takes(token_count)]
                if any(slot is None or slot.key is None for slot in wanted):
                    return None
                needed += [slot for slot in wanted if slot is not None]
            if kind.name == "state":
                slot = self.pool.find((number, sequence.namespace, token_count // self.pool.digest_tokens, (digest,)))
                if slot is None:
                    return None
                needed.append(slot)
        if not needed and not path:
            return None
        return TwinStop(sequence.namespace, token_count, digest, path, needed, None)

    def _parts(self, sequence: TwinSequence, slot: Slot, token_count: int) -> bool:
        """Returns whether another path than this sequence's is published behind a block of full attention."""
        kind = self.pool.kinds[slot.kind]
        if kind.name != "full_attention" or slot.key is None:
            return False
        behind = [s for s in self.pool.published if s.kind == slot.kind and s.namespace == slot.namespace and s.key]
        behind = [s for s in behind if s.key and s.key[3][:-1] == slot.key[3]]
        table, position = sequence.tables[slot.kind], token_count // kind.block_size
        own = table[position] if position < sequence.committed // kind.block_size else None
        return any(s is not (own and (own.twin or own)) for s in behind)

    def _part(self, stop: TwinStop) -> None:
        stop.is_parting |= len(self.ways(stop)) > 1
        stop.is_aside = self.is_continued(stop) and (stop.is_aside or not self.partings.are_early)

    def _end_old(self, stop: TwinStop | None) -> None:
        count, most = 0, CONTINUED_MAX + STEP_COUNT * self.partings.are_inside
        while stop is not None:
            before = self.before(stop.parent)
            is_counted = not stop.is_parting
            count += is_counted
            if count > most and is_counted:
                self.end(stop)
            stop = before
