"""A slow, obvious model of a pool: lists, and every question answered by looking at everything.

The twin shares no code with the core. Its data is in `state.py`, the rules of one kind of group in `kinds.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tests.allocator.twin.answers import Committed, Grown, refused
from tests.allocator.twin.drop import drop
from tests.allocator.twin.keep import keep, rank
from tests.allocator.twin.kept import count_tail, keep_or_exchange, release_kept, take_over
from tests.allocator.twin.retention import TwinRetention
from tests.allocator.twin.state import Slot, TwinSequence, TwinState


class TwinPool(TwinState):
    """A naive pool, which the real one must equal."""

    drop = drop

    def __init__(
        self,
        block_count: int,
        groups: Sequence[tuple[str, int, int]],
        watermark: int = 0,
        quotas: dict[str, tuple[int | None, int | None]] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(block_count, groups, watermark, quotas, **options)
        self.retention = TwinRetention(self)

    def allocate(
        self,
        sequence_id: int,
        token_count: int,
        digests: Sequence[bytes] = (),
        namespace: str = "",
        *,
        prompt_token_count: int = 0,
        priority: int = 0,
        defer_token_count: int = 0,
        is_return: bool = False,
        breakpoints: Sequence[int] = (),
    ) -> Grown:
        """Creates a sequence."""
        if sequence_id <= self.highest_id:
            return refused("EXISTS" if sequence_id in self.sequences else "ID_TOO_LOW")
        prompt = max(token_count, prompt_token_count)
        shareable = [d for i, d in enumerate(digests) if (i + 1) * self.digest_tokens < prompt]
        matched, tables = self.match(namespace, shareable)
        pending = self.digest_tokens * self.pending(namespace, shareable, matched // self.digest_tokens)
        junction = self.junction(namespace, shareable, matched)
        answer = self._admit(namespace, (matched, tables), token_count, prompt_token_count, priority)
        if "TOO_LONG" not in answer[0] and 0 < defer_token_count <= pending:
            return ("PENDING", matched, pending, [], [], 0, None, junction, ())
        if answer[0] in ("QUOTA", "NO_SPACE") and take_over(self):
            answer = self._admit(namespace, (matched, tables), token_count, prompt_token_count, priority)
        # no sequence will free blocks, so the prompt gets no hit
        if answer[0] == "NO_SPACE" and matched and not self.sequences:
            prompt = prompt_token_count
            same = {"priority": priority, "is_return": is_return, "breakpoints": breakpoints}
            return self.allocate(sequence_id, token_count, [], namespace, prompt_token_count=prompt, **same)
        if answer[0] != "OK":
            return (answer[0], 0, pending, [], [], answer[1], answer[2], 0, ())
        sequence = TwinSequence(namespace, matched, matched, tables, priority)
        for slot in [slot for table in tables for slot in table if slot is not None]:
            sequence.last[slot.kind] = slot
            slot.hits += 1
        if prompt > token_count:
            sequence.prompt, sequence.chunk = prompt, token_count
        told = self.retention.set_stops(
            sequence, shareable, max(matched, junction), prompt, junction, breakpoints=breakpoints
        )
        self.prompts.append((namespace, [d for i, d in enumerate(digests) if (i + 1) * self.digest_tokens <= prompt]))
        token_count = max(token_count, matched)
        if len(shareable) * self.digest_tokens > matched:
            sequence.announced, sequence.places = shareable, [matched // self.digest_tokens]
        self.sequences[sequence_id] = sequence
        self.highest_id = sequence_id
        if matched:
            self.retention.make(sequence, matched)
        _, copies = self._grant(sequence, token_count)
        if is_return:
            self.returned += prompt
            self.returned_hit += matched
        else:
            self.queried += prompt
            self.hit += matched
        return ("OK", matched, pending, self.tables(sequence_id), copies, 0, None, junction, told)

    def grow(self, sequence_id: int, token_count: int) -> Grown:
        """Makes room for more tokens."""
        sequence = self.sequences.get(sequence_id)
        if sequence is None:
            return refused("NOT_FOUND")
        if token_count <= sequence.token_count:
            return ("OK", 0, 0, [[] for _ in range(self.group_count)], [], 0, None, 0, ())
        after = 0
        for kind, table in zip(self.kinds, sequence.tables, strict=True):
            after += kind.width * (kind.entries(token_count) - table.count(None))
        if after > self.block_count:
            result, over = self.too_long(after, token_count, 1)
            return (result, 0, 0, [], [], over, None, 0, ())
        needed = sum(self._needs(sequence, token_count))
        copied = [slot for slot in self._foreign(sequence) if slot is not None]
        let_go = sum(len(slot.blocks) for slot in copied if self.holders(slot) == 1)
        over = self.over_quota(sequence.namespace, needed - let_go)
        if (over > 0 or needed > self.free_count()) and take_over(self):
            over = self.over_quota(sequence.namespace, needed - let_go)
        if over > 0:
            return ("QUOTA", 0, 0, [], [], over, None, 0, ())
        missing = needed - self.free_count()
        if missing > 0:
            own = [s for s in copied if s.key and self.kinds[s.kind].name == "state" and self.holders(s) == 1]
            if missing > sum(len(slot.blocks) for slot in own):
                return ("NO_SPACE", 0, 0, [], [], missing, self.victim(sequence.priority, sequence_id), 0, ())
            for slot in own:  # a sequence gives its own checkpoints up before it is refused
                self._not_published(slot)
                sequence.tables[slot.kind] = [Slot(slot.kind, slot.namespace, slot.blocks)]
        blocks, copies = self._grant(sequence, token_count)
        self._enforce_quota(sequence.namespace)
        return ("OK", 0, 0, blocks, copies, 0, None, 0, ())

    def commit(
        self, sequence_id: int, until: int, digests: Sequence[bytes] = (), keep_token_count: int = 0
    ) -> Committed:
        """Commits tokens that have been computed."""
        sequence = self.sequences.get(sequence_id)
        if sequence is None:
            return ("NOT_FOUND", [])
        if until > sequence.token_count:
            return ("TOO_LONG", [])
        granted = sequence.token_count
        if keep_token_count:
            granted = min(granted, max(keep_token_count, until))
        swaps = list[tuple[int, int, int]]()
        for number, kind in enumerate(self.kinds):
            if kind.name == "state" and granted > until:
                continue  # No checkpoint: the granted next pass would overwrite the state.
            replaced = []
            for position, digest in kind.filled(sequence.committed, until, digests, self.digest_tokens, sequence.stops):
                own = self._publish(sequence, number, position, digest, swaps)
                if kind.name == "full_attention":
                    replaced.append(own)
                else:
                    self._released(own)
            for own in reversed(replaced):
                self._released(own)
        before, sequence.committed = sequence.committed, until
        if granted < sequence.token_count:
            self._shrink(sequence, granted)
        self._advance(sequence)
        for end in sequence.stops:
            if before < end <= until:
                self.retention.make(sequence, end)
        self._settle(sequence)
        self._enforce_quota(sequence.namespace)
        return ("OK", swaps)

    def fork(self, parent_id: int, child_id: int) -> str:
        """Makes a sequence that shares its parent's committed tokens."""
        parent = self.sequences.get(parent_id)
        if parent is None:
            return "NOT_FOUND"
        if child_id <= self.highest_id:
            return "EXISTS" if child_id in self.sequences else "ID_TOO_LOW"
        if parent.token_count > parent.committed and any(kind.name == "state" for kind in self.kinds):
            return "UNCOMMITTED"
        if self.append_only and not self.is_edge(parent.committed):
            return "UNCOMMITTED"
        self.retention.turn_ended(parent)
        shared = [
            [slot and (slot.twin or slot) for slot in table[: kind.entries(parent.committed)]]
            for kind, table in zip(self.kinds, parent.tables, strict=True)
        ]
        child = TwinSequence(parent.namespace, parent.committed, parent.committed, shared, parent.priority)
        child.stop, child.last = parent.stop, dict(parent.last)
        parent.stops = [stop for stop in parent.stops if stop <= parent.prompt_end]
        child.stops, child.early_stop, child.prompt_end = parent.stops, parent.early_stop, parent.prompt_end
        child.needed = list(parent.needed)
        self.sequences[child_id] = child
        self.highest_id = child_id
        return "OK"

    def free(self, sequence_id: int, keep_ms: int = 0, keep_token_count: int = 0) -> str:
        """Drops a sequence, kind after kind, tail first."""
        sequence = self.sequences.get(sequence_id)
        if sequence is None:
            return "NOT_FOUND"
        self.retention.turn_ended(sequence)
        if keep_ms:
            keep(self, self.retention, sequence, keep_ms, keep_token_count)
        for number, table in enumerate(sequence.tables):
            slots = [slot for slot in reversed(table) if slot is not None]
            tail_count = count_tail(self.kinds[number], slots, len(table), sequence.committed)
            table.clear()
            for slot in slots[:tail_count]:
                self._released(slot)
            for slot in release_kept(self, slots[tail_count:]):
                self._released(slot)
            self.retention.forget(sequence, number)
        del self.sequences[sequence_id]
        self._enforce_quota(sequence.namespace)
        return "OK"

    # -- parts of operations -------------------------------------------------------------------------------------------

    def _admit(
        self,
        namespace: str,
        found: tuple[int, list[list[Slot | None]]],
        token_count: int,
        prompt_token_count: int,
        priority: int,
    ) -> tuple[str, int, tuple[int, int] | None]:
        """Decides whether a new sequence with these hits is admitted; returns result, shortfall and victim."""
        matched, tables = found
        hits = [slot for table in tables for slot in table if slot is not None]
        # a sequence copies a state instead of holding it
        kept = [slot for slot in hits if self.kinds[slot.kind].name != "state"]
        taken = sum(len(slot.blocks) for slot in kept)
        needed = sum(
            kind.width * (kind.entries(max(token_count, matched)) - (len(table) if kind.name != "state" else 0))
            for kind, table in zip(self.kinds, tables, strict=True)
        )
        whole = taken + needed
        if prompt_token_count > token_count:
            whole = self.peak(prompt_token_count, max(token_count, self.chunk_max))
        if whole > self.block_count:
            return (*self.too_long(whole, max(token_count, prompt_token_count), max(1, self.chunk_max)), None)
        revived = sum(len(slot.blocks) for slot in hits if not self.is_held(slot))
        newly_held = sum(len(slot.blocks) for slot in kept if not self.is_held(slot))
        if (over := self.over_quota(namespace, newly_held + needed)) > 0:
            return "QUOTA", over, None
        missing = whole - taken - (self.free_count() - revived)
        if self.sequences:
            missing += self.watermark + self.promised_count()
        if missing > 0:
            return "NO_SPACE", missing, self.victim(priority)
        return "OK", 0, None

    def _foreign(self, sequence: TwinSequence) -> list[Slot | None]:
        """Returns, per kind, the slot of the next token, if this sequence must not write it."""
        slots: list[Slot | None] = []
        for kind, table in zip(self.kinds, sequence.tables, strict=True):
            position = kind.written_next(sequence.token_count)
            slot = table[position] if position is not None and position < len(table) else None
            is_foreign = slot is not None and (slot.key is not None or self.holders(slot) > 1)
            slots.append(slot if is_foreign else None)
        return slots

    def _needs(self, sequence: TwinSequence, until: int) -> list[int]:
        """Counts the blocks that each kind needs to hold `until` tokens."""
        return [
            kind.width * (max(0, kind.entries(until) - len(table)) + (foreign is not None))
            for kind, table, foreign in zip(self.kinds, sequence.tables, self._foreign(sequence), strict=True)
        ]

    def _grant(self, sequence: TwinSequence, until: int) -> tuple[list[list[int]], list[tuple[int, int]]]:
        """Adds new slots at the end, and a copy in place of a foreign slot. Returns each group's new last entries, and
        the copies."""
        blocks = self._take(sum(self._needs(sequence, until)))
        copies: list[tuple[int, int]] = []
        added = []
        for number, (kind, foreign) in enumerate(zip(self.kinds, self._foreign(sequence), strict=True)):
            table = sequence.tables[number]
            first = len(table)
            if foreign is not None:
                first = table.index(foreign)
                table[first] = Slot(number, sequence.namespace, [blocks.pop(0) for _ in kind.groups])
                copies += zip(foreign.blocks, table[first].blocks, strict=True)
                self._released(foreign)
            while len(table) < kind.entries(until):
                table.append(Slot(number, sequence.namespace, [blocks.pop(0) for _ in kind.groups]))
            added.append(table[first:])
        assert not blocks
        self.copied += len(copies)
        sequence.token_count = until
        return self.by_group(added), copies

    def _take(self, count: int) -> list[int]:
        """Takes empty blocks, the one given back last first. Evicts cached ones if there are too few."""
        while len(self.empty) < count:
            self._evict(self.cached())
        self.granted += count
        return [self.empty.pop() for _ in range(count)]

    def _evict(self, candidates: list[Slot]) -> None:
        """Evicts the slot released longest ago, or the slot that the pool has chosen; never a slot with published
        descendants."""
        ranks = {id(slot): rank(self, self.retention, slot) for slot in candidates}
        candidates = [slot for slot in candidates if ranks[id(slot)] == min(ranks.values())]
        if self.leaving is None:
            slot = min(candidates, key=lambda slot: slot.released)
        else:
            place = self.leaving.popleft()
            (slot,) = [each for each in candidates if each.key and (*each.key[:3], each.key[3][-1]) == place]
        parents = {(s.kind, s.namespace, s.key[3][:-1]) for s in self.published if s.key}
        assert slot.key is not None
        if self.kinds[slot.kind].name == "full_attention":
            assert (slot.kind, slot.namespace, slot.key[3]) not in parents, "a parent leaves first"
        self.evicted += len(slot.blocks)
        path = slot.key[3]
        self.published.remove(slot)
        slot.key, slot.keep_until = None, 0
        self.empty += slot.blocks[::-1]
        self.retention.slot_left(slot, path)

    def _drop(self, slot: Slot) -> None:
        self.empty += slot.blocks[::-1]
        self._not_published(slot)

    def _not_published(self, slot: Slot) -> None:
        """Removes the publication of a checkpoint, so that no hit can end there."""
        assert slot.key is not None
        path = slot.key[3]
        self.retention.unpublish(slot)
        self.retention.slot_left(slot, path)

    def _released(self, slot: Slot) -> None:
        """Notes that one table fewer names a slot. After the last one, the slot is cached, or empty."""
        if self.is_held(slot):
            return
        if slot.key is not None:
            self.clock += 1
            slot.released = self.clock
        else:
            self.empty += slot.blocks[::-1]

    def _publish(
        self, sequence: TwinSequence, number: int, position: int, digest: bytes, swaps: list[tuple[int, int, int]]
    ) -> Slot:
        """Gives a slot its key, or replaces the slot by an earlier one with the same key; returns the earlier slot."""
        kind, table = self.kinds[number], sequence.tables[number]
        index = 0 if kind.name == "state" else position
        own = table[index]
        assert own is not None
        assert own.key is None
        path: tuple[bytes, ...] = (digest,)
        if kind.name == "full_attention" and position:
            before = table[position - 1]
            assert before is not None
            before = before.twin or before
            assert before.key is not None, "a child under a private parent"
            path = (*before.key[3], digest)
        key = (number, sequence.namespace, position, path)
        other = self.find(key)
        if other is None:
            own.key = key
            self.published.append(own)
        elif self.append_only:
            if keep_or_exchange(self, table, index, other):
                swaps += [(group, index, block) for group, block in zip(kind.groups, other.blocks, strict=True)]
        else:
            table[index] = other
            swaps += [(group, index, block) for group, block in zip(kind.groups, other.blocks, strict=True)]
        if kind.name == "state":
            sequence.last[number] = other or own
        return own

    def _shrink(self, sequence: TwinSequence, until: int) -> None:
        for kind, table in zip(self.kinds, sequence.tables, strict=True):
            while len(table) > kind.entries(until):
                last = table.pop()
                assert last is not None
                self._released(last)
        sequence.token_count = until

    def _advance(self, sequence: TwinSequence) -> None:
        """Advances announcements: published tokens are no longer pending."""
        count = sequence.committed // self.digest_tokens
        if count >= len(sequence.announced):
            sequence.announced, sequence.places = [], []
        elif count > sequence.places[-1]:
            sequence.places.append(count)

    def _settle(self, sequence: TwinSequence) -> None:
        """Gives back the blocks that no token from the committed ones on reads, deepest first."""
        for number, (kind, table) in enumerate(zip(self.kinds, sequence.tables, strict=True)):
            falling = [p for p, slot in enumerate(table) if slot and kind.has_fallen_out(p, sequence.committed)]
            slots = [slot for slot in (table[p] for p in falling) if slot is not None]
            for position in falling:
                table[position] = None
            slots = release_kept(self, slots[::-1])
            self.retention.remember(sequence, number, slots[::-1])
            for slot in slots:
                self._released(slot)

    def _enforce_quota(self, namespace: str) -> None:
        """Evicts slots of a namespace that has more cached than its quota allows."""
        limit = self.quotas.get(namespace, self.quotas.get("*", (None, None)))[1]
        while limit is not None and self.cached_count(namespace) > limit:
            self._evict(self.cached(namespace))
