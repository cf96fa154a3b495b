"""All groups of a pool as one: combines the hits, needs and grants of its managers.

Prefixes are searched in the order of the managers. Groups keep the order of the pool's specification. Block counts
include all groups.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from quire_allocator.core.blocks import Blocks
from quire_allocator.core.events import EventLog
from quire_allocator.core.eviction.queue import Candidates
from quire_allocator.core.groups.factory import make_managers
from quire_allocator.core.groups.history import PromptHistory
from quire_allocator.core.groups.manager import Commit, Hit
from quire_allocator.core.retention.retention import Retention
from quire_allocator.core.retention.stop import Run, Unit, living
from quire_allocator.core.scopes import Namespace
from quire_allocator.core.sequence import SequenceState
from quire_allocator.core.spec import DIGEST_BYTES, NEVER, NO_BLOCKS, OTHERS, Copy, GroupKind, PoolSpec, Swap


class Found:
    """The published part of a prompt: the hit of each manager, and their common lengths as in `Match`.

    Not a named tuple, because the compiled core would need thousands of instructions to make one.
    """

    __slots__ = ("attended_token_count", "hits", "matched_token_count")

    def __init__(self, hits: list[Hit], matched_token_count: int, attended_token_count: int) -> None:
        self.hits = hits
        self.matched_token_count = matched_token_count
        self.attended_token_count = attended_token_count


class Coordinator:
    """The managers of one pool.

    Attributes:
        in_place: whether some group keeps a state that forward passes overwrite.
        settles: whether some group gives blocks back while its sequences live.
        in_step: whether all groups need their next block at the same token: one block size, and no states.
        group_count: number of groups, and of blocks that `append_rows` takes for each sequence.
        history: the latest prompts, in a pool where no group keeps whole prefixes; else None.
        retention: knows where hits can end, and keeps blocks cached for them.
    """

    def __init__(self, spec: PoolSpec, blocks: Blocks, log: EventLog) -> None:
        self.retention = Retention(spec, blocks)
        self.managers = make_managers(spec, log, self.retention)
        self.digest_tokens = spec.block_size
        self.in_place = any(manager.in_place for manager in self.managers)
        self._settling = [(number, manager) for number, manager in enumerate(self.managers) if manager.settles]
        self.settles = bool(self._settling)
        assert not (spec.append_only and self.in_place), "an append-only pool cannot have groups of states"
        self._full_count = len(self.managers) - len(self._settling)  # full-attention managers, the first in `managers`
        self.history = PromptHistory() if not self._full_count else None
        self._edge_tokens = spec.edge_tokens
        self.in_step = not self.in_place and len({group.block_size for group in spec.groups}) == 1
        order = [group for manager in self.managers for group in manager.groups]
        self.group_count = len(order)
        # For each group, the index of its block in a row of `append_rows`; empty if rows are in group order.
        self._places = [order.index(group) for group in range(len(order))] if order != sorted(order) else []
        self._blocks = blocks
        states = [number for number, m in enumerate(self.managers) if m.spec.kind is GroupKind.STATE]
        self._ending = states[0] if states else 0  # number of the manager that gives the last edge where hits may end
        self._quotas = {quota.namespace: quota for quota in spec.quotas}
        # The namespace without a name, if no quota limits it. This namespace is empty when the pool forgets it, so the
        # same object serves the next sequence without a name.
        self._unnamed: Namespace | None = None

    def new_namespace(self, name: str) -> Namespace:
        """Returns an empty namespace; the caller files it."""
        if not name and self._unnamed is not None and "" not in self._blocks.namespaces:
            # A pool that uses only the nameless namespace forgets it with each last sequence, and soon needs it again.
            return self._unnamed
        quota = self._quotas.get(name) or self._quotas.get(OTHERS)
        limits_cache = quota is not None and quota.cached_blocks_max is not None
        space = Namespace(name, quota, Candidates(self._blocks.policy) if limits_cache else None)
        space.scopes = tuple([manager.new_scope(space) for manager in self.managers])
        if not name and quota is None:
            self._unnamed = space
        return space

    def space(self, name: str) -> Namespace:
        """Returns the namespace of that name; files an empty one if the pool has none."""
        space = self._blocks.namespaces.get(name)
        if space is None:
            space = self._blocks.namespaces[name] = self.new_namespace(name)
        return space

    def find(self, space: Namespace, digests: bytes, token_limit: int) -> Found:
        """Returns the hits, their common length in tokens (the fixed point of all hit rules), and the junction.

        The junction is the length that full attention alone would serve or, without full attention, the length that
        another prompt shares. 0 unless this length exceeds the common length.
        """
        if len(self.managers) == 1:
            (manager,) = self.managers
            hit = manager.find(space.scopes[0], digests, token_limit)
            return Found([hit], hit.token_count, self._attended(space, digests, token_limit, hit.token_count))
        hits, length, attended = [], token_limit, token_limit
        for number, manager in enumerate(self.managers):
            hit = manager.find(space.scopes[number], digests, length)
            length = hit.token_count
            hits.append(hit)
            if number < self._full_count:
                attended = length
        agree = False
        while not agree:
            agree = True
            for number, manager in enumerate(self.managers):
                if hits[number].token_count != length:
                    hits[number] = manager.find(space.scopes[number], digests, length)
                    length = hits[number].token_count
                    agree = False
        return Found(hits, length, self._attended(space, digests, attended, length))

    def _attended(self, space: Namespace, digests: bytes, attended: int, matched: int) -> int:
        """Returns the last edge in (matched, attended], or 0.

        Example: blocks of 16 and 64 tokens, 200 tokens in full attention, and no state give 192. A sequence that makes
        a checkpoint there lets the next sequence hit.
        """
        if not self.settles:
            return 0
        if self.history is not None:
            attended = min(attended, self.history.common_count(space.name, digests) * self.digest_tokens)
        junction = attended // self._edge_tokens * self._edge_tokens
        return junction if junction > matched else 0

    def _note_parting(
        self, space: Namespace, hits: Sequence[Hit], end: int, digests: bytes, prompt_token_count: int
    ) -> None:
        """Records that a new prompt diverges from earlier ones after `end` tokens."""
        behind = self.managers[0].behind(space.scopes[0], hits[0], digests, end)
        if behind is not None:
            last = end // self.digest_tokens * DIGEST_BYTES
            is_whole = end + self._edge_tokens >= prompt_token_count
            key = space.name, end, digests[last - DIGEST_BYTES : last]
            self.retention.note_parting(key, behind, is_whole=is_whole)

    def open(
        self, space: Namespace, found: Found, digests: bytes, prompt: int, priority: int, *, breakpoints: Sequence[int]
    ) -> SequenceState:
        """Makes a sequence that holds only its hits, and notes where its prompt diverges from earlier prompts."""
        hits, token_count, junction = found.hits, found.matched_token_count, found.attended_token_count
        keeps = not self.retention.is_even
        parts_at = junction or hits[0].token_count
        if keeps and parts_at:
            self._note_parting(space, hits, parts_at, digests, prompt)
        if self.history is not None:
            self.history.note(space.name, digests[: prompt // self.digest_tokens * DIGEST_BYTES])
        if keeps and junction:
            for manager, hit in zip(self.managers, hits):
                manager.cut_after(hit)
        turn = self.retention.rules.turn(prompt, token_count, junction, breakpoints)
        space.sequence_count += 1  # counted first: else the namespace would be forgotten with its last cached block
        parts = tuple([m.open(scope, hit) for m, scope, hit in zip(self.managers, space.scopes, hits)])
        sequence = SequenceState(space, token_count, priority, parts, turn)
        if keeps and token_count:
            self._stop_at(sequence, token_count)
        self.settle(sequence)
        return sequence

    def fork(self, parent: SequenceState) -> SequenceState:
        """Makes a sequence that shares the committed tokens of its parent."""
        self.end_turn(parent)
        length = parent.committed_token_count
        parts = tuple([manager.fork(part, length) for manager, part in zip(self.managers, parent.parts)])
        child = SequenceState(parent.namespace, length, parent.priority, parts, parent.turn.fork())
        child.quiet_until = parent.quiet_until
        return child

    def end_turn(self, sequence: SequenceState) -> None:
        """Makes a stop at the last committed edge where later hits can end, unless the sequence has one there."""
        if self.retention.is_even:
            return
        last = living(sequence.turn.last)
        number = self._ending
        end = self.managers[number].last_end(sequence.parts[number], sequence.committed_token_count)
        if end > (0 if last is None else last.token_count):
            self._stop_at(sequence, end)

    def keep(self, sequence: SequenceState, keep_ms: int, token_count: int) -> None:
        """Requests that the first `token_count` tokens of a sequence are evicted late for `keep_ms`."""
        last = self.managers[self._ending].last_end(sequence.parts[self._ending], sequence.committed_token_count)
        end = min(last, token_count // self._edge_tokens * self._edge_tokens)
        digest = self.managers[0].digest_at(sequence.parts[0], end) if end else b""
        if digest:
            pairs = zip(self.managers, sequence.parts)
            self._blocks.keep(sequence.namespace, [e for m, p in pairs for e in m.entries_at(p, end, digest)], keep_ms)

    def _stop_at(self, sequence: SequenceState, token_count: int) -> None:
        """Makes a stop after `token_count` tokens of a sequence, if all groups can serve them from its blocks."""
        digest = self.managers[0].digest_at(sequence.parts[0], token_count)
        if not digest:
            return
        key = sequence.namespace.name, token_count, digest
        stop = self.retention.find(key)
        if stop is None:
            needed, runs, way_count = list[Unit](), list[Run](), 0
            for manager, part in zip(self.managers, sequence.parts):
                tail = manager.units_at(part, token_count, digest)
                if tail is None:
                    return
                needed += tail
                run = manager.run_at(part, token_count)
                if run is not None:
                    runs.append(run)
                    way_count += manager.other_way_count(part, token_count)
            if not needed and not runs:
                return
            stop = self.retention.make(sequence.turn, key, needed, runs, other_way_count=way_count)
        self.retention.passed(sequence.turn, stop)

    def grant(self, sequence: SequenceState, needs: Sequence[int], until: int, copies: list[Copy]) -> list[array[int]]:
        """Takes and returns the blocks that each manager needs and now owns. The caller has checked `free_count`."""
        self._blocks.taker = sequence.namespace
        blocks = self._blocks.take(sum(needs))
        if len(self.managers) == 1:
            granted = [blocks]
            limit = self.managers[0].grow(sequence.parts[0], sequence.token_count, until, blocks, copies)
        else:
            granted, first, limit = [], 0, NEVER
            for manager, part, need in zip(self.managers, sequence.parts, needs):
                own = blocks[first : first + need]
                limit = min(limit, manager.grow(part, sequence.token_count, until, own, copies))
                granted.append(own)
                first += need
        sequence.token_count = until
        sequence.limit = limit
        return granted

    def append_rows(self, sequences: Sequence[SequenceState]) -> array[int]:
        """Takes one more block for every group of each sequence, at a block edge of groups in step. Nothing can be
        shared there. The caller has raised the limits of the sequences.

        Returns:
            The blocks, sequence by sequence, one for each group.
        """
        source, first = self._blocks, 0
        if len(sequences) * self.group_count <= source.empty_count:
            blocks = source.take(len(sequences) * self.group_count)
        else:  # Each row's evictions count for the namespace of the row's sequence, so rows are taken singly.
            blocks = NO_BLOCKS[:]
            for sequence in sequences:
                source.taker = sequence.namespace
                blocks.extend(source.take(self.group_count))
        for sequence in sequences:
            for manager, part in zip(self.managers, sequence.parts):
                manager.append_row(part, blocks, first)
                first += manager.width
        if self._places:
            rows = range(0, len(blocks), self.group_count)
            return array("I", [blocks[row + place] for row in rows for place in self._places])
        return blocks

    def commit(self, sequence: SequenceState, until: int, digests: bytes, granted: int) -> list[Swap]:
        """Counts a sequence's tokens up to `until` as committed, publishes full blocks with digests, and gives back
        blocks beyond `granted` tokens. Returns swaps for blocks that other sequences had published before."""
        committed = sequence.committed_token_count
        ends = sequence.turn.reached(committed, until)
        new = Commit(committed, until, digests, ends)
        self._publish(sequence, new, has_room=granted > until)
        if granted < sequence.token_count:
            for manager, part in zip(self.managers, sequence.parts):
                manager.shrink(part, granted)
            sequence.token_count = granted
        if ends and not self.retention.is_even:
            for end in ends:
                self._stop_at(sequence, end)
        self.settle(sequence)
        return new.swaps

    def _publish(self, sequence: SequenceState, new: Commit, *, has_room: bool) -> None:
        sequence.committed_token_count = until = new.until
        size = (until // self.digest_tokens - new.committed // self.digest_tokens) * DIGEST_BYTES
        if not size:
            return
        if len(new.digests) != size:
            new.digests = new.digests[:size]
            sequence.is_named = sequence.is_named and len(new.digests) == size
        for manager, part in zip(self.managers, sequence.parts):
            # If granted slots remained, the next pass would overwrite a published state without a grow that copies it.
            if not has_room or not manager.in_place:
                manager.commit(part, new)

    def settle(self, sequence: SequenceState) -> None:
        """Gives back the blocks that no token after the committed ones reads. Notes the next token count whose commit
        publishes or gives back."""
        committed = sequence.committed_token_count
        quiet = (committed // self.digest_tokens + 1) * self.digest_tokens
        for number, manager in self._settling:
            quiet = min(quiet, manager.settle(sequence.parts[number], committed))
        sequence.quiet_until = quiet

    def note_limit(self, sequence: SequenceState) -> None:
        """Notes the token count beyond which a grow must grant or copy blocks."""
        limit = NEVER
        for manager, part in zip(self.managers, sequence.parts):
            limit = min(limit, manager.room(part, sequence.token_count))
        sequence.limit = limit

    def tables(self, sequence: SequenceState) -> tuple[array[int], ...]:
        """Returns one table for each group, with `NULL_BLOCK` where a block was given back."""
        return self._by_group([m.tables(part) for m, part in zip(self.managers, sequence.parts)])

    def added(self, granted: Sequence[array[int]]) -> tuple[array[int], ...]:
        """Returns, for each group, the newly granted blocks: the last entries of its table."""
        return self._by_group([manager.added(blocks) for manager, blocks in zip(self.managers, granted)])

    def _by_group(self, by_manager: Sequence[Sequence[array[int]]]) -> tuple[array[int], ...]:
        if len(by_manager) == 1:
            return tuple(by_manager[0])
        tables: list[array[int]] = [array("I")] * self.group_count
        for manager, own in zip(self.managers, by_manager):
            for group, table in zip(manager.groups, own):
                tables[group] = table
        return tuple(tables)
