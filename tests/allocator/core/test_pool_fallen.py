"""Finding, committing, freeing and evicting fallen blocks of windows costs time per stretch, not per block."""

from __future__ import annotations

import random
from typing import Any

import pytest
from quire_allocator.core.groups.units import UnitScope
from quire_allocator.core.pool import Pool
from quire_allocator.core.readers import index, invariants
from quire_allocator.core.retention.stop import Unit
from quire_allocator.core.spec import GroupSpec, PoolSpec, Result

from tests.allocator.core.compiled import IS_COMPILED
from tests.allocator.core.pools import chunked, full, grow, positions_asked_for, published, sliding

LONG = 20_000  # a long prompt has this many blocks of 4 tokens
WINDOW = 16  # blocks

needs_sources = pytest.mark.skipif(IS_COMPILED, reason="calls inside of a compiled class are not seen")


def text(seed: int, count: int) -> bytes:
    return random.Random(seed).randbytes(32 * count)


def window_scope(pool: Pool) -> Any:
    return pool.blocks.namespaces[""].scopes[-1]


def window_pool(*groups: GroupSpec, retention: str = "") -> Pool:
    return Pool(PoolSpec(3 * LONG, groups or (full(4), sliding(4, 4 * WINDOW)), retention=retention))


def computed(pool: Pool, sequence_id: int, digests: bytes, chunk: int = 1 << 40) -> None:
    """Computes a prompt in passes of `chunk` blocks."""
    count = len(digests) // 32
    done = min(chunk, count)
    assert pool.allocate(sequence_id, 4 * done, digests, prompt_token_count=4 * count).result is Result.OK
    committed = pool.sequences[sequence_id].committed_token_count // 4
    while True:
        assert pool.commit(sequence_id, 4 * done, digests[32 * committed : 32 * done]).result is Result.OK
        committed, done = done, min(done + chunk, count)
        if committed == count:
            return
        assert grow(pool, sequence_id, 4 * done).result is Result.OK


# -- how much work -----------------------------------------------------------------------------------------------------


@needs_sources
@pytest.mark.parametrize("retention", ["auto", "dense"])
@pytest.mark.parametrize("group", [sliding(4, 4 * WINDOW), chunked(4, 4 * WINDOW)], ids=["sliding", "chunked"])
def test_a_commit_makes_no_more_units_than_a_window_needs(
    group: GroupSpec, retention: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, original = list[int](), Unit.__init__

    def count(self: Unit, scope: UnitScope, blocks: Any) -> None:
        made.append(len(blocks))
        original(self, scope, blocks)

    pool, digests = window_pool(full(4), group, retention=retention), text(1, LONG)
    monkeypatch.setattr(Unit, "__init__", count)
    computed(pool, 1, digests)
    assert len(made) <= 4 * (WINDOW + 2)  # units of the window, of the last two stops' blocks, and of one edge more
    assert len(window_scope(pool).stretches) <= 3
    pool.free(1)
    assert len(made) <= 4 * (WINDOW + 2)
    invariants.check(pool)
    assert pool.match("", digests) == 4 * LONG


@needs_sources
@pytest.mark.parametrize("kind", [sliding, chunked])
def test_a_lookup_looks_only_where_something_begins(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = window_pool(kind(4, 4 * WINDOW))
    for prompt in range(2):
        computed(pool, prompt + 1, text(prompt, LONG))
    scope, looks = window_scope(pool), positions_asked_for(monkeypatch)

    class Counted(dict):  # type: ignore[type-arg]
        def get(self, key: tuple[int, bytes]) -> Any:  # type: ignore[override]
            looks.append(key[0])
            return super().get(key)

    scope.stretches = Counted(scope.stretches)
    # at the edge of a chunk, a hit needs no block
    assert pool.match("", text(9, LONG)) == (0 if kind is sliding else 4 * LONG)
    assert len(looks) <= 8
    looks.clear()
    assert pool.match("", text(0, LONG)) == 4 * LONG
    assert len(looks) <= WINDOW + 8


@needs_sources
def test_a_prompt_in_passes_leaves_a_stretch_for_each_pass() -> None:
    pool, digests = window_pool(), text(1, 1_000)
    computed(pool, 1, digests, chunk=100)
    scope = window_scope(pool)
    assert len(scope.stretches) <= 2 * 10
    assert len(scope.units()) <= 3 * WINDOW
    invariants.check(pool)


# -- results ------ ----------------------------------------------------------------------------------------------------


def test_a_hit_inside_of_a_stretch_makes_units_of_a_window_and_leaves_the_rest() -> None:
    pool, digests = window_pool(), text(1, 1_000)
    computed(pool, 1, digests)
    before = {key: blocks for key, (blocks, _) in published(window_scope(pool)).items()}
    part = digests[: 32 * 500] + text(2, 8)
    assert pool.match("", part) == 2_000
    answer = pool.allocate(2, 4 * 508, part)
    assert answer.matched_token_count == 2_000
    invariants.check(pool)
    assert {key: blocks for key, (blocks, _) in published(window_scope(pool)).items()} == before
    table = answer.blocks[1]
    wanted = [before[position, digests[32 * position : 32 * position + 32]][0] for position in range(484, 500)]
    assert list(table[484:500]) == wanted
    pool.free(2)
    pool.free(1)
    invariants.check(pool)
    assert {key: blocks for key, (blocks, _) in published(window_scope(pool)).items()} == before


def test_a_stretch_leaves_from_its_deep_end_in_one_event() -> None:
    pool, digests = Pool(PoolSpec(1_100, (sliding(4, 4 * WINDOW),))), text(1, 1_000)
    computed(pool, 1, digests)
    pool.free(1)
    pool.log.publish(0)
    cursor = pool.log.last_cursor
    assert pool.allocate(2, 4 * 600).result is Result.OK  # the new sequence takes 500 of the cached blocks
    pool.log.publish(0)
    ((_, event),) = pool.log.after(cursor, 99)
    assert len(event.digests) == 32 * 500
    invariants.check(pool)
    kept = {position for position, _ in published(window_scope(pool))}
    assert kept == {*range(event.first_position), *range(event.first_position + 500, 1_000)}


def test_a_prompt_that_is_computed_twice_at_once_takes_over_what_was_published_first() -> None:
    pool, digests = window_pool(), text(1, 1_000)
    for sequence_id in (1, 2):
        assert pool.allocate(sequence_id, 4_000, digests).result is Result.OK
    assert not pool.commit(1, 4_000, digests).swaps
    before = {key: blocks for key, (blocks, _) in published(window_scope(pool)).items()}
    swaps = pool.commit(2, 4_000, digests).swaps
    invariants.check(pool)
    assert len(swaps) == 2_000
    assert {swap.position: swap.block for swap in swaps if swap.group == 1} == {
        position: blocks[0] for (position, _), blocks in before.items()
    }
    assert {key: blocks for key, (blocks, _) in published(window_scope(pool)).items()} == before


def test_a_watcher_is_told_of_all_positions_while_units_and_stretches_become_each_other() -> None:
    pool, digests = window_pool(), text(1, 1_000)
    computed(pool, 1, digests)
    expected, told, walk = set(published(window_scope(pool))), set(), index.walk(pool)
    part = digests[: 32 * 500] + text(2, 8)
    for number, stretch in enumerate(walk):
        if stretch.groups == (1,):
            found = [stretch.digests[i : i + 32] for i in range(0, len(stretch.digests), 32)]
            told |= {(stretch.first_position + i, digest) for i, digest in enumerate(found)}
        if number == 1:
            assert pool.allocate(2, 4 * 508, part).matched_token_count == 2_000
        if number == 2:
            pool.free(1)
    assert told == expected


@pytest.mark.parametrize("seed", range(6))
def test_digests_that_stand_for_no_prefix_break_nothing(seed: int) -> None:
    """An owner with randomly repeating digests harms its own hits, but no invariant."""
    dice = random.Random(seed)
    spec = PoolSpec(60, (full(2), sliding(2, 5), chunked(2, 4)), retention=dice.choice(("auto", "dense")))
    pool, next_id = Pool(spec), 1

    def digests(count: int) -> bytes:
        return b"".join(bytes([dice.randrange(2)]) * 32 for _ in range(count))

    for _ in range(400):
        live = list(pool.sequences)
        if len(live) < 4:
            length = dice.randint(1, 24)
            pool.allocate(next_id, length, digests(length // 2))
            next_id += 1
        sequence_id = dice.choice(live or [0])
        sequence = pool.sequences.get(sequence_id)
        if sequence is not None:
            until = sequence.token_count
            count = until // 2 - sequence.committed_token_count // 2
            pool.commit(sequence_id, until, digests(count))
            if dice.random() < 0.5:
                pool.free(sequence_id)
            else:
                grow(pool, sequence_id, until + dice.randint(1, 9))
        invariants.check(pool)
