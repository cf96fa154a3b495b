"""Pools learn where prompts diverge from cached ones, and keep windows cached there. Numbers worked out by hand."""

from __future__ import annotations

import pytest
from quire_allocator.core.pool import Pool
from quire_allocator.core.readers import invariants
from quire_allocator.core.retention.partings import LATE_BELIEVED, Partings
from quire_allocator.core.spec import GroupSpec, PoolSpec

from tests.allocator.core.pools import full, grow, make_pool, sliding, state, stops_of
from tests.allocator.core.test_retention import serve, text


def partings_of(pool: Pool) -> Partings:
    retention = pool.coordinator.retention
    return retention.partings


def seen(pool: Pool) -> tuple[float, float]:
    """Counts the prompts that diverged late, and the prompts that diverged inside others."""
    partings = partings_of(pool)
    assert partings.again == 0
    return partings.late - LATE_BELIEVED, partings.inside


def parted(number: int, block_count: int, kept: int) -> bytes:
    """Returns a prompt that agrees with `text(0, ...)` in its first `kept` blocks."""
    return text(0, block_count)[: 32 * kept] + text(number, block_count)[32 * kept :]


def test_a_chat_that_goes_on_parts_late_and_an_edited_one_early() -> None:
    pool = make_pool(200, full(4), sliding(4, 4))
    serve(pool, text(0, 8), 32)
    assert seen(pool) == (0, 0)  # the first prompt has no other prompt to diverge from
    serve(pool, text(0, 10), 41)  # the prompt begins with all eight cached blocks, and no cached block follows
    assert seen(pool) == (1, 0)
    serve(pool, parted(1, 10, 5), 41)  # the prompt diverges inside the ten cached blocks
    assert seen(pool) == (1, 1)
    serve(pool, parted(2, 10, 5), 41)  # a prompt that diverges where an earlier one already did is not counted
    assert seen(pool) == (1, 1)


def test_a_prompt_parts_late_if_less_than_an_edge_follows() -> None:
    pool = make_pool(200, full(4), sliding(16, 16))
    serve(pool, text(0, 11), 44)
    # Hits end at multiples of 16. After 32 tokens, three cached blocks follow: less than an edge.
    serve(pool, text(0, 11) + text(1, 4), 60)
    assert seen(pool) == (1, 0)
    serve(pool, parted(2, 15, 4), 60)
    assert seen(pool) == (1, 1)


def test_prompts_that_are_asked_again_make_no_steps() -> None:
    pool = make_pool(200, full(4), sliding(4, 4))
    for chat in range(4):
        for _ in range(2):
            serve(pool, text(chat, 10), 40)  # the second hit ends at 36, and one more cached block follows
    partings = partings_of(pool)
    assert (partings.again, partings.inside) == (4, 0)
    assert partings.are_early
    assert not partings.are_inside


def test_older_prompts_count_half_beyond_the_last_256() -> None:
    pool = make_pool(8_000, full(4), sliding(4, 4))
    for number in range(253):
        serve(pool, text(number, 2), 8)
        serve(pool, text(number, 3), 13)
    partings = partings_of(pool)
    assert (partings.inside, partings.late) == (0, (253 + LATE_BELIEVED) / 2)


def test_steps_double_their_distance_and_stand_at_edges() -> None:
    partings = Partings(16)
    assert partings.steps_before(1_000) == [960, 928, 864, 736, 480]
    assert partings.steps_before(32) == []
    assert len(partings.steps_before(1_000_000)) == 7


def test_where_many_prompts_part_early_hits_can_end_before_the_ends_of_prompts() -> None:
    pool = make_pool(2_000, full(4), sliding(4, 8))
    # 3 prompts are edited, and a new pool assumes 4 late ones: 3 of 7 exceeds the share of 0.4
    for number in range(1, 4):
        serve(pool, text(10 * number, 8), 32)
        serve(pool, text(10 * number, 8)[: 32 * 4] + text(10 * number + 1, 4), 32)
    assert partings_of(pool).are_inside
    serve(pool, text(0, 20), 81)
    invariants.check(pool)
    own = text(0, 20)
    stops = stops_of(pool)
    ends = [count for count, digest in stops if digest == own[8 * count - 32 : 8 * count]]
    assert sorted(ends) == [16, 48, 64, 72, 80]  # stops 64, 32, 16 and 8 tokens before the prompt's end, and at the end
    assert not any(stop.is_aside for stop in stops.values() if stop.token_count > 32)


def edited_chats(pool: Pool, *, chat_count: int, round_count: int) -> float:
    """Returns the hit share of the common tokens of chats. The last quarter of each chat is rewritten each time."""
    hits = 0
    for number in range(round_count):
        for chat in range(chat_count):
            digests = text(chat, 40)[: 32 * 30] + text(1_000 * (number + 1) + chat, 10)
            matched = serve(pool, digests, 161)
            hits += matched if number else 0
    invariants.check(pool)
    return hits / ((round_count - 1) * chat_count * 120)


def test_a_pool_that_has_learned_it_hits_what_edited_prompts_have_in_common() -> None:
    # A chat takes 40 blocks of full attention and, with its steps, at most 40 of the window. The first edit of each
    # chat makes a junction, and later edits hit it.
    pool = Pool(PoolSpec(12 * 60, (full(4), sliding(4, 32))))
    assert edited_chats(pool, chat_count=8, round_count=6) > 0.8


def test_without_full_attention_nothing_is_learned_of_partings() -> None:
    pool = make_pool(200, sliding(4, 4))
    for number in range(9):
        serve(pool, parted(number, 10, 5), 41)
    assert seen(pool) == (0, 0)
    assert not partings_of(pool).are_inside


def test_steps_of_states_stand_where_checkpoints_are_and_wait_for_more_prompts_that_part_early() -> None:
    partings = Partings(16, 512)
    assert partings.steps_before(4_000) == [
        3_584,
        3_072,
        2_560,
        1_536,
    ]  # 3,968, 3,936 and so on, each rounded down to a multiple of 512
    assert partings.steps_before(500) == []
    partings.inside, partings.late = 2.0, 1.0
    assert not partings.are_inside
    partings.inside = 3.0
    assert partings.are_inside


@pytest.mark.parametrize("groups", [(full(4), state(16)), (state(16),)])
def test_checkpoints_before_the_end_of_a_prompt_stay_while_prompts_part_early(groups: tuple[GroupSpec, ...]) -> None:
    pool = make_pool(400, *groups)
    partings_of(pool).inside = 100.0
    size = pool.digest_tokens
    pool.allocate(1, 16, text(0, 200 // size), prompt_token_count=200)
    for end in (*range(16, 200, 16), 196, 200):
        done = pool.sequences[1].committed_token_count
        grow(pool, 1, end)
        pool.commit(1, end, text(0, 200 // size)[32 * (done // size) : 32 * (end // size)], end)
    pool.free(1)
    invariants.check(pool)
    stops = stops_of(pool)
    # Steps are two, four, ... edges before the last edge, rounded down to 16. With full attention edges are 4 tokens
    # apart and the last edge is 196; with states alone, 16 and 192.
    steps = {64, 128, 160, 176} if len(groups) > 1 else {64, 128, 160}
    assert {count for count, _ in stops} >= steps
    assert not any(stop.is_aside for stop in stops.values())


def test_hits_end_near_the_parting_although_nobody_parted_there_before() -> None:
    pool = make_pool(4_000, full(4), sliding(4, 16))
    for number in range(1, 4):
        serve(pool, text(10 * number, 8), 32)
        serve(pool, text(10 * number, 8)[: 32 * 4] + text(10 * number + 1, 4), 32)
    serve(pool, text(0, 64), 257)
    spare = pool.blocks.namespaces[""].scopes[1].spare
    pool.blocks.take(pool.blocks.empty_count + spare)  # the take evicts everything that no stop needs
    matched = [pool.match("", parted(5, 64, kept)) for kept in (63, 62, 60, 56, 50, 40, 20)]
    assert matched == [252, 248, 240, 224, 192, 128, 0]
