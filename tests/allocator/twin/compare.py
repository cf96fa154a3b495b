"""Compares a pool with its twin: one call does an operation on both, another compares all observable state."""

from __future__ import annotations

import copy
import random
from array import array
from collections import Counter, deque
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

from quire_allocator.core.drop import drop_cached
from quire_allocator.core.events import Change, Event
from quire_allocator.core.groups.runs import RunScope
from quire_allocator.core.pool import Pool
from quire_allocator.core.readers import invariants
from quire_allocator.core.readers.usage import block_states, table_entry_count
from quire_allocator.core.spec import CommitResult, GroupKind, GroupSpec, GrowResult, PoolSpec, Quota, Result

from tests.allocator.core.compiled import what_if
from tests.allocator.core.pools import grow, published
from tests.allocator.twin.memory import Memory, Writer
from tests.allocator.twin.pool_twin import TwinPool
from tests.allocator.twin.state import TwinSequence

LRU = "lru"
Groups = list[tuple[str, int, int]]  # (kind, block size, window) of each group
Stored = tuple[int, str, int, bytes]  # (kind, namespace, position, digest) of a published slot


@dataclass(frozen=True, slots=True)
class Shape:
    """The shape of a pool that is so small that evictions and NO_SPACE are common.

    Attributes:
        tokens_max: most sequences have at most this many tokens.
        is_honest: False if the owner makes digests up. The contents of its blocks are then not checked.
    """

    block_count: int
    tokens_max: int
    groups: Groups
    is_honest: bool = True
    append_only: bool = False


class Comparison:
    """A pool of some shape with limits chosen at random, its twin, and the memory behind both."""

    def __init__(self, shape: Shape, rng: random.Random, policy: str) -> None:
        self.shape, self.random, self.is_lru = shape, rng, policy == LRU
        watermark = rng.choice((0, 0, 1, 3))
        held = rng.randint(min(3 * len(shape.groups), shape.block_count), shape.block_count)
        cached = rng.randint(0, shape.block_count // 2)
        quotas: dict[str, tuple[int | None, int | None]] = rng.choice(
            ({}, {}, {"blue": (held, cached)}, {"*": (None, cached)}, {"": (held, None), "*": (held, cached)})
        )
        chunk_max = rng.choice((0, 0, 1, rng.randint(2, shape.tokens_max)))
        retention = rng.choice(("auto", "auto", "auto", "dense"))
        spec = PoolSpec(
            shape.block_count,
            tuple(GroupSpec(GroupKind[name.upper()], size, window) for name, size, window in shape.groups),
            watermark_block_count=watermark,
            quotas=tuple(Quota(name, *limits) for name, limits in quotas.items()),
            eviction_policy=policy,
            chunk_token_count_max=chunk_max,
            retention=retention,
            append_only=shape.append_only,
        )
        self.pool = Pool(spec)
        self.twin = TwinPool(
            shape.block_count,
            shape.groups,
            watermark,
            quotas,
            chunk_max=chunk_max,
            retention=retention,
            append_only=shape.append_only,
        )
        self.memory = Memory(shape.block_count, self.twin)
        self.has_state = any(kind.name == "state" for kind in self.twin.kinds)
        self.writers: dict[int, Writer] = {}
        self.texts: list[list[int]] = []
        self.seen: Counter[str] = Counter()
        self.trace: deque[str] = deque([f"limits: {watermark=} {quotas=} {chunk_max=} {retention=}"], maxlen=40)
        self.now = 0
        self._acknowledged = self._cursor = 0
        self._mirror: Counter[Stored] = Counter()
        self._stored_at: dict[int, Counter[Stored]] = {}

    def do(self, event: str, *arguments: Any, **options: Any) -> Any:
        """Does one operation on both, which must give the same answer; returns the twin's answer."""
        joined = [b"".join(argument) if isinstance(argument, list) else argument for argument in arguments]
        recorded = self.pool.log._recorded
        before = len(recorded)
        own = {"drop": drop_cached, "grow": grow}
        operate = partial(own[event], self.pool) if event in own else getattr(self.pool, event)
        ours = plain(operate(*joined, **options), self.twin.group_count)
        if not self.is_lru:
            self.twin.leaving = deque()
            for record in [Event(*recorded[number]) for number in range(before, len(recorded))]:
                if record.change is Change.REMOVED:
                    self.twin.leaving.extend(reversed(self._digests_of(record)))
        shown = ", ".join([*(str(a) if not isinstance(a, list) else f"<{len(a)}>" for a in arguments), str(options)])
        self.trace.append(f"{self.now}: {event}({shown}) -> {ours}")
        theirs = getattr(self.twin, event)(*arguments, **options)
        assert not self.twin.leaving, f"the pool evicted what need not leave: {self.twin.leaving}"
        result = theirs if isinstance(theirs, str) else theirs[0] if isinstance(theirs, tuple) else "OK"
        self.seen[f"{event} {result}"] += 1
        self.seen["taken over"] = self.twin.taken_over
        self.seen["keep refused"] = self.twin.refused_keeps
        if event in ("allocate", "grow"):
            self.seen["copy"] += len(theirs[4])
            self.seen["hit"] += theirs[1] > 0
            self.seen["pending"] += theirs[2] > 0
            self.seen["victim"] += theirs[6] is not None
            self.seen["junction"] += theirs[7] > 0
            self.seen["breakpoint"] += any(stop in theirs[8] for stop in options.get("breakpoints", ()))
            self.seen["early end"] += event == "allocate" and theirs[0] == "OK" and self._newest().early_stop > 0
        if event == "drop":  # the order in which the blocks of a subtree become empty is the pool's choice
            self.seen["dropped"] += ours
            assert sorted(self.pool.blocks.empty) == sorted(self.twin.empty)
            self.twin.empty = list(self.pool.blocks.empty)[::-1]
        assert ours == theirs, f"{event}: the pool answers {ours}, its twin {theirs}"
        return theirs

    def do_many(self, sequence_ids: list[int], token_counts: list[int]) -> list[Any]:
        """Does `do("grow", ...)` for several sequences by the pool's `grow_many`."""
        if not self.is_lru:
            return [self.do("grow", *grow) for grow in zip(sequence_ids, token_counts, strict=True)]
        grants, others = self.pool.grow_many(array("Q", sequence_ids), token_counts)
        busy = dict(others)
        assert grants.rows == sorted(set(grants.rows)), "what was granted comes in order"
        granted, width, first = {}, self.twin.group_count, 0
        blocks = array("I", chain.from_iterable(grants.blocks))
        for entry, row in enumerate(grants.rows):
            tables = []
            for count in grants.counts[entry * width : (entry + 1) * width]:
                tables.append(blocks[first : first + count])
                first += count
            granted[row] = tuple(tables)
        assert first == len(blocks)
        answers = []
        for number, named in enumerate(zip(sequence_ids, token_counts, strict=True)):
            grown = busy.get(number, GrowResult(Result.OK, 0, 0, granted.get(number, ())))
            assert grown.blocks == granted.get(number, ())
            ours = plain(grown, width)
            theirs = self.twin.grow(*named)
            self.trace.append(f"{self.now}: grow_many({named}) -> {ours}")
            self.seen[f"grow {theirs[0]}"] += 1
            assert ours == theirs, f"grow: the pool answers {ours}, its twin {theirs}"
            answers.append(theirs)
        return answers

    # -- comparison ----------------------------------------------------------------------------------------------------

    def compare(self) -> None:
        """Compares everything that can be seen, and checks the pool's own invariants and the memory."""
        pool, twin = self.pool, self.twin
        invariants.check(pool)
        assert list(pool.blocks.empty) == twin.empty[::-1]
        cached = twin.cached_count()
        assert (pool.blocks.cached_count, pool.blocks.free_count) == (cached, len(twin.empty) + cached)
        assert set(pool.blocks.namespaces) == twin.namespaces()
        for name, space in pool.blocks.namespaces.items():
            assert (space.held_count, space.cached_count) == (twin.held_count(name), twin.cached_count(name))
        assert list(pool.sequences) == list(twin.sequences)
        for sequence_id, ours in pool.sequences.items():
            theirs = twin.sequences[sequence_id]
            assert (ours.namespace.name, ours.token_count) == (theirs.namespace, theirs.token_count)
            assert (ours.committed_token_count, ours.priority) == (theirs.committed, theirs.priority)
            assert (ours.turn.prompt_end, ours.turn.early) == (theirs.prompt_end, theirs.early_stop)
            assert ours.turn.token_counts == tuple(theirs.stops)
            assert ours.promised == twin.promised(theirs) * bool(theirs.prompt), f"promised to {sequence_id}"
            assert [list(table) for table in pool.tables(ours)] == twin.tables(sequence_id)
        tables = [table for sequence in twin.sequences.values() for table in sequence.tables]
        assert table_entry_count(pool) == sum(len(slot.blocks) for table in tables for slot in table if slot)
        assert pool.last_sequence_id == twin.highest_id
        counters = (pool.granted_block_count, pool.copy_count, pool.queried_token_count, pool.matched_token_count)
        assert counters == (twin.granted, twin.copied, twin.queried, twin.hit)
        returned = (pool.returned_token_count, pool.returned_matched_token_count)
        assert returned == (twin.returned, twin.returned_hit)
        assert pool.blocks.evicted_count == twin.evicted
        self._compare_published()
        self._compare_retention()
        self._compare_answers()
        if self.shape.is_honest:
            self.memory.check_published()
            for sequence_id, writer in self.writers.items():
                self.memory.check_sequence(writer, twin.sequences[sequence_id])

    def _newest(self) -> TwinSequence:
        return self.twin.sequences[self.twin.highest_id]

    def _compare_published(self) -> None:
        """Compares the published blocks with their digests, and the number of tables of each block."""
        ours = {}
        for space in self.pool.blocks.namespaces.values():
            for number, scope in enumerate(space.scopes):
                if isinstance(scope, RunScope):
                    continue  # full attention is compared by matches and by events
                ours.update({(number, space.name, *key): blocks for key, (blocks, _) in published(scope).items()})
        kinds = self.twin.kinds
        slots = [slot for slot in self.twin.published if kinds[slot.kind].name != "full_attention"]
        assert ours == {(*slot.key[:3], slot.key[3][-1]): slot.blocks for slot in slots if slot.key}
        states = bytearray(self.pool.spec.block_count)
        for slot in self.twin.published:
            for block in slot.blocks:
                states[block] = 1
        for _, slot in self.twin.all_slots():
            for block in slot.blocks:
                states[block] = max(2, states[block] + 1) if states[block] != 1 else 2
        assert block_states(self.pool).to_bytes() == states

    def _compare_retention(self) -> None:
        """Compares the stops, and the eviction order of windows and states."""
        spaces = self.pool.blocks.namespaces
        retention = self.pool.coordinator.retention
        ours = {(*key, stop.is_parting, stop.is_aside) for key, stop in retention.stops.items()}
        theirs = {(b.namespace, b.token_count, b.digest, b.is_parting, b.is_aside) for b in self.twin.stops}
        assert ours == theirs
        if not retention.is_even:
            learned, twin = retention.partings, self.twin.retention.partings
            assert (learned.late, learned.again, learned.inside) == (twin.late, twin.again, twin.inside)
            self.seen["prompts part early"] += learned.are_early
            self.seen["prompts part inside"] += learned.are_inside
            self.seen["early end replaced"] = self.twin.replaced_count
            self.seen["an answer goes on"] = self.twin.answered_count
        others = [number for number, kind in enumerate(self.twin.kinds) if not kind.keeps_prefixes]
        cached = [slot for slot in self.twin.cached() if slot.kind in others]
        for slot in cached:
            assert slot.key is not None
            _, worth = published(spaces[slot.namespace].scopes[slot.kind])[slot.key[2], slot.key[3][-1]]
            assert worth == self.twin.retention.worth(slot), f"{slot.key} is worth {worth}"
        for name, space in spaces.items():
            for number in others:
                spare = [
                    s for s in cached if (s.namespace, s.kind) == (name, number) and not self.twin.retention.worth(s)
                ]
                assert space.scopes[number].spare == sum(len(slot.blocks) for slot in spare)

    def _compare_answers(self) -> None:
        """Compares the hits and waits of a prompt, and its victims."""
        pool, twin, rng = self.pool, self.twin, self.random
        namespace, text = rng.choice(("", "blue", "gone")), rng.choice(self.texts)
        length = rng.randint(0, len(text))
        digests = self.memory.digests(self.memory.numbers(text), 0, length)
        joined = b"".join(digests)
        matched, _ = twin.match(namespace, digests)
        assert pool.find(namespace, joined) == (matched, twin.junction(namespace, digests, matched))
        place = matched // twin.digest_tokens
        pending = pool.pending.pending_count(namespace, joined, place, len(digests))
        assert pending == twin.pending(namespace, digests, place)
        priority, except_id = rng.randint(0, 2), rng.choice([0, *twin.sequences])
        assert pool.admission.cheapest_victim(priority, except_id=except_id) == twin.victim(priority, except_id)

    def compare_free_order(self) -> None:
        """Compares the order in which all free blocks would be granted."""
        if self.is_lru:
            order = what_if(self.pool.blocks, lambda blocks: list(blocks.take(blocks.free_count)))
            twin = copy.deepcopy(self.twin)
            assert order == twin._take(twin.free_count())

    def compare_events(self) -> None:
        """Replays the acknowledged events, and no others, from an empty index."""
        self._stored_at[self.now] = Counter(
            (*slot.key[:3], slot.key[3][-1]) for slot in self.twin.published if slot.key
        )
        if self.random.random() < 0.75:
            return
        log, step = self.pool.log, self.random.randint(self._acknowledged, self.now)
        log.publish(step)
        assert log.can_resume(self._cursor)
        for cursor, event in log.after(self._cursor, 1 << 30):
            assert cursor == self._cursor + 1
            assert self._acknowledged < event.step <= step
            self._cursor = cursor
            digests = self._digests_of(event)
            if event.change is Change.STORED:
                self._check_parent(event, digests)
                self._mirror.update(digests)
            else:
                assert all(self._mirror[digest] for digest in digests), "removed before it was stored"
                self._mirror.subtract(digests)
        assert +self._mirror == self._stored_at.get(step, Counter()), "the events do not give the index"
        self._acknowledged = step
        self._stored_at = {number: stored for number, stored in self._stored_at.items() if number >= step}

    def _check_parent(self, event: Event, digests: list[Stored]) -> None:
        """Checks that full attention names the block before, and that this block is in the index."""
        if self.twin.kinds[digests[0][0]].name == "full_attention" and event.first_position:
            kind, namespace, position, _ = digests[0]
            assert self._mirror[(kind, namespace, position - 1, event.parent_digest)] > 0, (
                "stored below what is not there"
            )
        else:
            assert event.parent_digest == b""

    def _digests_of(self, event: Event) -> list[Stored]:
        kind = next(number for number, manager in enumerate(self.pool.managers) if manager is event.scope.manager)
        name, data = event.scope.namespace.name, bytes(event.digests)
        digests = [data[i : i + 32] for i in range(0, len(data), 32)]
        return [(kind, name, event.first_position + i, digest) for i, digest in enumerate(digests)]


def plain(answer: Any, group_count: int) -> Any:
    """Returns an answer of the pool in the twin's form."""
    if isinstance(answer, Result):
        return answer.name
    if isinstance(answer, CommitResult):
        return (answer.result.name, [tuple(swap) for swap in answer.swaps])
    if isinstance(answer, GrowResult):
        blocks = [list(blocks) for blocks in answer.blocks]
        if answer.result is Result.OK and not blocks:
            blocks = [[] for _ in range(group_count)]
        copies = [tuple(copy) for copy in answer.copies]
        victim = tuple(answer.victim) if answer.victim is not None else None
        counts = (answer.matched_token_count, answer.pending_token_count)
        stops = (answer.attended_token_count, answer.stops)
        return (answer.result.name, *counts, blocks, copies, answer.shortfall, victim, *stops)
    return answer
