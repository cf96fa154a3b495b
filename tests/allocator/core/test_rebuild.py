"""A pool made of its owner's report is the pool that was lost; a wrong report is refused and says why."""

from __future__ import annotations

import random
from array import array
from typing import Any

import pytest
from quire.hashing import split_digests
from quire.protocol.outcomes import read_reply
from quire.protocol.packing import unpack_uint32
from quire.session.block_report import report_chunks, report_end
from quire.session.ledger import Ledger
from quire.v1 import _packed_pb2 as packed
from quire.v1 import allocator_pb2 as pb
from quire_allocator.core.events import Event
from quire_allocator.core.eviction.queue import LED, RANKED, SPARE
from quire_allocator.core.groups.runs import RunScope
from quire_allocator.core.pool import Pool
from quire_allocator.core.readers import index, invariants
from quire_allocator.core.rebuild import rebuild as rebuild_module
from quire_allocator.core.rebuild.rebuild import Rebuild
from quire_allocator.core.rebuild.report import Report, ReportedSequence, ReportedStretch
from quire_allocator.core.refusal import Refusal
from quire_allocator.core.spec import GroupKind, GroupSpec, PoolSpec
from quire_allocator.session.staged_report import StagedReport
from quire_allocator.session.steps import pool_digest
from quire_allocator.wire import step_apply, step_checks, translate

from tests.allocator.core.pools import grow, stops_of
from tests.allocator.twin.rebuild import NodeBuilder
from tests.simulation.histories import APPEND_ONLY, GROUPS, History, pool_spec

FULL = PoolSpec(8, (GroupSpec(GroupKind.FULL_ATTENTION, 4),))


def rebuilt(ledger: Ledger, spec: PoolSpec) -> Pool:
    """Returns the pool that an allocator makes of the ledger's report."""
    return taken_in(report_chunks(ledger), ledger, spec)


def taken_in(chunks: list[pb.ReportChunk], ledger: Ledger, spec: PoolSpec) -> Pool:
    """Returns the pool that an allocator makes of these chunks, sent over the wire."""
    staged = StagedReport(spec)
    for chunk in chunks:
        staged.add(pb.ReportChunk.FromString(chunk.SerializeToString()))
    return staged.finish(report_end(chunks, last_step=1, last_sequence_id=ledger.last_sequence_id))


def published(pool: Pool) -> set[tuple[Any, ...]]:
    """Returns everything that can be hit: groups, namespace, position and digest of every block."""
    found = set()
    for stretch in index.walk(pool):
        for number in range(len(stretch.digests) // 32):
            digest = bytes(stretch.digests[number * 32 : number * 32 + 32])
            found.add((tuple(stretch.groups), stretch.namespace, stretch.first_position + number, digest))
    return found


def eviction_order(pool: Pool) -> list[tuple[int, bytes]]:
    """Evicts the whole cache, and returns the order."""
    pool.log.discard()
    order = []
    while pool.blocks.cached_count:
        pool.blocks.take(pool.blocks.empty_count + 1)
    for record in pool.log._recorded:
        event = Event(*record)
        digests, first = split_digests(event.digests), event.first_position
        removed = [(first + i, digest) for i, digest in enumerate(digests)]
        order += [(event.scope.manager.groups[0], *entry) for entry in reversed(removed)]
    return order


class Played:
    """Plays one history against a pool, and keeps the owner's ledger of it."""

    def __init__(self, kinds: str, seed: int, **fields: Any) -> None:
        self.message = pool_spec(kinds, 24 if len(GROUPS.get(kinds, ())) == 1 else 64, **fields)
        self.spec = translate.pool_spec(self.message)
        self.pool = Pool(self.spec)
        self.ledger = Ledger(self.message)
        self.history = History(self.message, random.Random(seed))
        self.number = 0

    def step(self) -> None:
        self.number += 1
        step = self.history.make().message
        step.number = self.number
        reply = packed.StepReply(number=self.number)
        step_apply.apply_step(self.pool, step_checks.check_step(self.pool, step), reply)
        outcome = read_reply(step, reply, len(self.message.groups))
        self.ledger.apply(step, outcome)
        self.history.take(step, outcome, self.ledger)
        self.history.check(self.ledger)


@pytest.mark.parametrize("kinds", [*GROUPS, *APPEND_ONLY])
@pytest.mark.parametrize("seed", range(4))
def test_the_rebuilt_pool_is_the_one_that_was_lost(kinds: str, seed: int) -> None:
    played = Played(kinds, seed)
    for _ in range(60):
        played.step()
        assert pool_digest(played.pool) == played.ledger.digest()
        again = rebuilt(played.ledger, played.spec)
        invariants.check(again)
        assert pool_digest(again) == played.ledger.digest()
        assert again.last_sequence_id == played.pool.last_sequence_id
        assert published(again) >= published(played.pool)
        assert again.blocks.free_count == played.pool.blocks.free_count


@pytest.mark.parametrize("kinds", [*GROUPS, *APPEND_ONLY])
def test_a_history_goes_on_upon_the_rebuilt_pool_as_if_nothing_had_happened(kinds: str) -> None:
    played = Played(kinds, 5)
    for number in range(150):
        if number % 7 == 3:
            played.pool = rebuilt(played.ledger, played.spec)
        played.step()
        invariants.check(played.pool)
        assert pool_digest(played.pool) == played.ledger.digest()


@pytest.mark.parametrize("seed", range(6))
def test_blocks_leave_the_rebuilt_cache_in_the_order_in_which_they_would_have_left(seed: int) -> None:
    played = Played("full", seed)
    for _ in range(80):
        played.step()
    again = rebuilt(played.ledger, played.spec)
    assert published(again) == published(played.pool)
    assert eviction_order(again) == eviction_order(played.pool)


@pytest.mark.parametrize("seed", range(3))
def test_freed_blocks_may_be_reported_in_any_order(seed: int) -> None:
    played, dice, freed = Played("two full", seed), random.Random(seed), 0
    while freed < 4:
        played.step()
        freed = sum(len(chunk.freed_steps) for chunk in report_chunks(played.ledger))
    ordered, mixed = (report_chunks(played.ledger) for _ in range(2))
    for chunk in mixed:
        columns = (chunk.freed_steps, chunk.freed_operations, chunk.freed_positions)
        rows = list(zip(unpack_uint32(chunk.freed_blocks), *columns, strict=True))
        dice.shuffle(rows)
        chunk.freed_blocks = array("I", [row[0] for row in rows]).tobytes()
        for number, column in enumerate(columns, 1):
            column[:] = [row[number] for row in rows]
    assert mixed != ordered
    found = [taken_in(chunks, played.ledger, played.spec) for chunks in (ordered, mixed)]
    assert eviction_order(found[0]) == eviction_order(found[1])


# -- the slow twin -----------------------------------------------------------------------------------------------------


def shape(pool: Pool) -> set[tuple[Any, ...]]:
    """Returns every run with its place in the tree, its holders and its place in the order of eviction."""
    found = set()
    for space in pool.blocks.namespaces.values():
        for manager, scope in zip(pool.managers, space.scopes, strict=True):
            for run in manager.tree.runs(scope.root) if isinstance(scope, RunScope) else ():
                above = (space.name, manager.groups, run.parent.last_digest, run.first_position)
                found.add((*above, bytes(run.digests), run.blocks.tobytes(), run.live, run.released, run.ticket))
    return found


def cut_up(chunks: list[pb.ReportChunk], dice: random.Random) -> list[pb.ReportChunk]:
    """Returns an equal report with stretches cut elsewhere, in another order, one stretch in each chunk."""
    single = []
    for chunk in chunks:
        for whole in chunk.prefixes:
            parent, first, count = whole.parent_digest, 0, len(whole.blocks) // 4
            while first < count:
                end = min(count, first + dice.randint(1, 6))
                part = pb.ReportedPrefix(group=whole.group, first_position=whole.first_position + first)
                part.parent_digest, part.blocks = parent, whole.blocks[first * 4 : end * 4]
                part.digests = whole.digests[first * 32 : end * 32]
                single.append(pb.ReportChunk(prefixes=[part], namespaces=[chunk.namespaces[whole.namespace]]))
                parent, first = part.digests[-32:], end
        chunk.ClearField("prefixes")
    dice.shuffle(single)
    whole_report = [chunk for chunk in chunks if chunk.sequences or chunk.freed_blocks] + single
    for number, chunk in enumerate(whole_report):
        chunk.number = number
    return whole_report


@pytest.mark.parametrize("kinds", [*GROUPS, *APPEND_ONLY])
@pytest.mark.parametrize("seed", range(3))
def test_runs_are_rebuilt_as_position_by_position(kinds: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    played, dice = Played(kinds, seed), random.Random(seed)
    for _ in range(80):
        played.step()
        chunks = cut_up(report_chunks(played.ledger), dice)
        plain = taken_in(chunks, played.ledger, played.spec)
        with monkeypatch.context() as patch:
            patch.setitem(rebuild_module.BUILDERS, GroupKind.FULL_ATTENTION, NodeBuilder)
            slow = taken_in(chunks, played.ledger, played.spec)
        assert shape(plain) == shape(slow)
        assert (plain.blocks.cached_count, plain.blocks.empty) == (slow.blocks.cached_count, slow.blocks.empty)
        assert pool_digest(plain) == pool_digest(slow) == played.ledger.digest()


def test_what_a_sequence_keeps_is_kept_again() -> None:
    played = Played("append-only", 1)
    while not any(sequence.twins for sequence in played.ledger.sequences.values()):
        played.step()
    chunks = report_chunks(played.ledger)
    again = taken_in(chunks, played.ledger, played.spec)
    kept, before = (
        {
            (number, part): list(own.kept or ())
            for number, s in pool.sequences.items()
            for part, own in enumerate(s.parts)
        }  # type: ignore[attr-defined]
        for pool in (again, played.pool)
    )
    assert kept == before
    assert any(kept.values())


def test_a_report_that_keeps_what_nobody_has_published_is_refused() -> None:
    played = Played("append-only", 1)
    while not any(sequence.twins for sequence in played.ledger.sequences.values()):
        played.step()
    sequence = next(sequence for sequence in played.ledger.sequences.values() if sequence.twins)
    (group, position), twin = next(iter(sequence.twins.items()))
    sequence.twins[group, len(sequence.tables[group]) - 1] = twin
    sequence.tables[group][position] = twin
    with pytest.raises(Refusal, match="report: "):
        rebuilt(played.ledger, played.spec)


# -- wrong reports -----------------------------------------------------------------------------------------------------


def d(letters: str) -> bytes:
    return b"".join(letter.encode() * 32 for letter in letters)


def sequence(number: int, tokens: int, committed: int, table: list[int], **fields: Any) -> ReportedSequence:
    return ReportedSequence(number, "", tokens, committed, [array("I", table)], **fields)


def prefix(first: int, parent: bytes, digests: bytes, blocks: list[int], group: int = 0) -> ReportedStretch:
    return ReportedStretch("", group, first, parent, digests, array("I", blocks))


AB = prefix(0, b"", d("ab"), [0, 1])
WRONG: dict[str, tuple[Report, str]] = {
    "a block held by two": (
        Report([sequence(1, 3, 0, [5]), sequence(2, 3, 0, [5])], last_sequence_id=2),
        "block 5 is held twice",
    ),
    "a block out of range": (Report([sequence(1, 3, 0, [8])], last_sequence_id=1), "block 8 is out of range"),
    "a published block out of range": (Report([], [prefix(0, b"", d("a"), [8])]), "block 8 is out of range"),
    "one block, two digests": (Report([], [AB, prefix(0, b"", d("c"), [1])]), "block 1 is published twice"),
    "one digest, two blocks": (Report([], [AB, prefix(0, b"", d("a"), [2])]), "have the same digest"),
    "one digest, two places": (Report([], [AB, prefix(1, d("b"), d("a"), [2])]), "is at two places"),
    "a group too many": (Report([], [prefix(0, b"", d("a"), [0], group=1)]), "group 1 does not exist"),
    "digests that are missing": (Report([], [prefix(0, b"", d("a"), [0, 1])]), "one digest for each block"),
    "half a parent": (Report([], [prefix(1, b"x", d("a"), [0])]), "32 bytes"),
    "no parent": (Report([], [prefix(1, b"", d("a"), [0])]), "unless it begins at position 0"),
    "ids that fall": (Report([sequence(2, 1, 0, [0]), sequence(1, 1, 0, [1])], last_sequence_id=2), "ids must rise"),
    "an id beyond the last": (Report([sequence(2, 1, 0, [0])], last_sequence_id=1), "above last_sequence_id"),
    "more computed than granted": (Report([sequence(1, 1, 2, [0])], last_sequence_id=1), "more committed tokens than"),
    "a short table": (Report([sequence(1, 5, 0, [0])], last_sequence_id=1), "do not fit its 5 tokens"),
    "computed without a digest": (Report([sequence(1, 5, 4, [0, 1])], last_sequence_id=1), "no chain of digests"),
    "no way to the root": (
        Report([sequence(1, 8, 8, [0, 1])], [prefix(1, d("a"), d("b"), [1])], last_sequence_id=1),
        "no chain of digests",
    ),
    "another path than its digests": (
        Report([sequence(1, 8, 8, [3, 1])], [AB], last_sequence_id=1),
        "other blocks than its digests",
    ),
    "to be written and published": (
        Report([sequence(1, 4, 0, [0])], [AB], last_sequence_id=1),
        "holds it as not yet written",
    ),
    "shared by two prefixes": (
        Report([sequence(1, 6, 6, [0, 4]), sequence(2, 2, 2, [4])], [AB], last_sequence_id=2),
        "different prefixes|held twice",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_report_is_refused_and_says_why(name: str) -> None:
    report, message = WRONG[name]
    with pytest.raises(Refusal, match=message) as caught:
        Rebuild(FULL).finish(report)
    assert caught.value.reason == "MALFORMED"


@pytest.mark.parametrize("is_published", [True, False])
def test_a_half_filled_position_that_is_shared_in_one_group_only_is_refused(is_published: bool) -> None:
    spec = PoolSpec(8, (GroupSpec(GroupKind.FULL_ATTENTION, 4),) * 2)
    prefixes = [prefix(0, b"", d("a"), [0]), prefix(0, b"", d("a"), [1], group=1)] if is_published else []

    def report(other: int) -> Report:
        tables = [(1, [0], [other]), (2, [0], [1])]
        sequences = [ReportedSequence(n, "", 2, 2, [array("I", a), array("I", b)]) for n, a, b in tables]
        return Report(sequences, prefixes, last_sequence_id=2)

    invariants.check(Rebuild(spec).finish(report(1)))
    with pytest.raises(Refusal, match=r"different prefixes|in some groups only"):
        Rebuild(spec).finish(report(5))


def test_the_right_one_beside_them_is_taken() -> None:
    report = Report([sequence(1, 6, 6, [0, 4]), sequence(3, 8, 8, [0, 1])], [AB], last_sequence_id=7)
    pool = Rebuild(FULL).finish(report)
    invariants.check(pool)
    assert pool.match("", d("abc")) == 8
    assert pool.blocks.free_count == 5
    assert grow(pool, 7, 4).result.name == "NOT_FOUND"
    assert pool.allocate(8, 4).result.name == "OK"


def test_blocks_without_their_ancestors_are_not_taken_over_where_nobody_holds_them() -> None:
    pool = Rebuild(FULL).finish(Report([], [prefix(0, b"", d("a"), [3]), prefix(2, d("b"), d("c"), [4])]))
    invariants.check(pool)
    assert (pool.match("", d("abc")), pool.blocks.cached_count, pool.blocks.empty_count) == (4, 1, 7)


# -- where hits can end ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("has_full", [True, False])
def test_a_rebuilt_pool_keeps_what_the_lost_one_kept(has_full: bool) -> None:
    kinds = [GroupSpec(GroupKind.FULL_ATTENTION, 4)] * has_full + [GroupSpec(GroupKind.SLIDING_WINDOW, 4, 8)]
    text = [bytes([i]) * 32 for i in range(1, 9)]
    # The window had blocks 10 to 17. The stop after 32 tokens needs blocks 16 and 17. Blocks 10, 11 and 15 are still
    # cached, although no stop needs them.
    prefixes = [prefix(0, b"", b"".join(text[:2]), [10, 11], group=int(has_full))]
    prefixes.append(prefix(5, text[4], b"".join(text[5:]), [15, 16, 17], group=int(has_full)))
    if has_full:
        prefixes.append(prefix(0, b"", b"".join(text), list(range(8))))
    order = [*range(10, 18), *range(7, -1, -1)] if has_full else list(range(10, 18))
    report = Report(prefixes=prefixes, released=[block for block in order if block not in (12, 13, 14)])
    rebuild = Rebuild(PoolSpec(20, tuple(kinds)))
    pool = rebuild.finish(report)
    invariants.check(pool)
    space = pool.blocks.namespaces[""]
    stops = sorted(token_count for token_count, _ in stops_of(pool))
    assert stops[-1] == 32
    units = space.scopes[int(has_full)].units()  # type: ignore[attr-defined]
    worths = {unit.blocks[0]: unit.worth for unit in units}
    kept = LED if has_full else RANKED
    assert [worths[block] for block in (15, 16, 17)] == [SPARE, kept, kept]
    joined = b"".join(text)
    assert pool.match("", joined) == 32


@pytest.mark.parametrize("kinds", ["hybrid", "state and full", "everything"])
@pytest.mark.parametrize("seed", range(4))
def test_what_is_spare_in_a_rebuilt_pool_was_not_needed_by_the_deepest_stops(kinds: str, seed: int) -> None:
    played = Played(kinds, seed)
    for _ in range(80):
        played.step()
    again = rebuilt(played.ledger, played.spec)
    for name in played.pool.blocks.namespaces:
        last = {
            key
            for key, stop in stops_of(played.pool, name).items()
            if not stop.way_count and not stop.is_parting and not stop.runs[0].live
        }
        assert last <= set(stops_of(again, name))
