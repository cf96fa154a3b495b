"""Sliding-window and chunked-local groups: kept blocks, fallen blocks, and hits. Numbers worked out by hand.

A token at position `t` of a sliding window of `w` reads `t - w + 1` to `t`; of chunks of `w` it reads its own chunk up
to itself. A block falls out when no later token reads anything in it.
"""

from __future__ import annotations

import pytest
from quire_allocator.core.readers import invariants
from quire_allocator.core.spec import GroupSpec, Result

from tests.allocator.core.pools import (
    NULL,
    blocks_of,
    chunked,
    commit,
    computed,
    counts,
    d,
    filled,
    forget,
    full,
    granted_next,
    grow,
    make_pool,
    sliding,
    states,
    tables,
)

LETTERS = "abcdefghijklmnopqrstuvwxyz"


def test_112_tokens_of_10_full_and_20_sliding_layers_take_11_blocks() -> None:
    # Blocks have 16 tokens, the window 32, and groups 10 layers. Full attention takes 112 / 16 = 7 blocks. The token at
    # 112 reads tokens 81 to 112. So each sliding group still needs the last two of its 7 blocks, with tokens 80 to 95
    # and 96 to 111.
    pool = make_pool(32, full(16), sliding(16, 32), sliding(16, 32))
    pool.allocate(1, 112, d("abcdefg"))
    assert counts(pool) == (11, 0, 21)  # one pass computes all tokens, and writes 7 blocks in each group
    commit(pool, 1, "abcdefg", 112)
    assert counts(pool) == (11, 10, 11)
    groups = tables(pool, 1)
    assert [len(table) for table in groups] == [7, 7, 7]
    assert [table.count(NULL) for table in groups] == [0, 5, 5]
    assert groups[1][:5] == groups[2][:5] == [NULL] * 5
    assert len({block for table in groups for block in table if block != NULL}) == 11


@pytest.mark.parametrize(("block_count", "result"), [(15, Result.OK), (14, Result.PASS_TOO_LONG)])
def test_the_same_prompt_in_chunks_of_16_is_let_in_where_15_blocks_are(block_count: int, result: Result) -> None:
    # A pass of 16 tokens reads 31 tokens before it; these 47 tokens touch at most 4 blocks of 16. So the prompt needs 7
    # blocks of full attention and 4 of each window: 15.
    pool = make_pool(block_count, full(16), sliding(16, 32), sliding(16, 32))
    # In one pass the prompt needs 7 blocks in each of three groups. In passes of 1 token it needs 7 + 3 + 3.
    at_once = pool.allocate(1, 112, d("abcdefg"))
    assert (at_once.result, at_once.shortfall) == (Result.PASS_TOO_LONG, 21 - block_count)
    assert pool.allocate(1, 16, d("abcdefg"), prompt_token_count=112).result is result
    for token_count in range(16, 113, 16) if result is Result.OK else ():
        assert grow(pool, 1, token_count).result is Result.OK
        commit(pool, 1, "abcdefg", token_count)


@pytest.mark.parametrize(
    ("group", "kept_at", "gone_at"),
    [
        (sliding(4, 8), 10, 11),  # the token at 11 reads tokens 4 to 11, none in the first block
        (sliding(4, 5), 7, 8),
        (sliding(4, 4), 6, 7),
        (sliding(4, 2), 4, 5),  # the window is smaller than a block: the token at 4 still reads token 3
        (sliding(4, 1), 3, 4),
        (sliding(1, 3), 2, 3),
        (chunked(4, 8), 7, 8),
        (chunked(4, 6), 5, 6),  # the first chunk ends in the middle of block 1
        (chunked(4, 3), 5, 6),  # block 0 has tokens of two chunks
        (chunked(1, 4), 3, 4),
    ],
)
def test_the_first_block_is_given_back_when_no_later_token_reads_it(
    group: GroupSpec, kept_at: int, gone_at: int
) -> None:
    pool = make_pool(16, group)
    pool.allocate(1, 12)
    for committed in range(1, kept_at + 1):
        commit(pool, 1, LETTERS, committed)
        assert blocks_of(pool, 1)[0] == 0
    commit(pool, 1, LETTERS, gone_at)
    assert blocks_of(pool, 1)[0] == NULL
    assert states(pool)[0] == 1  # the block is cached, and can still be hit


def test_a_chunk_is_given_back_whole_at_its_edge_and_what_reaches_beyond_it_is_kept() -> None:
    pool = make_pool(8, chunked(4, 8))
    computed(pool, 1, "a", tokens=3)
    assert blocks_of(pool, 1) == [0, 1]
    grow(pool, 1, 8)
    commit(pool, 1, "ab", 8)
    assert blocks_of(pool, 1) == [NULL, NULL]
    pool = make_pool(8, chunked(4, 6))
    computed(pool, 1, "ab", tokens=3)  # chunks end at 6 and 12: tokens 8 to 10 read tokens 6 and 7, in block 1
    assert blocks_of(pool, 1) == [NULL, 1, 2]
    grow(pool, 1, 12)
    commit(pool, 1, "abc", 12)
    assert blocks_of(pool, 1) == [NULL, NULL, NULL]


def test_of_what_falls_out_together_the_deepest_is_evicted_first() -> None:
    pool = make_pool(8, sliding(4, 4), retention="dense")
    computed(pool, 1, "abcde")  # the token at 20 reads tokens 17 to 20: blocks 0 to 3 have fallen out
    assert blocks_of(pool, 1) == [NULL, NULL, NULL, NULL, 4]
    assert granted_next(pool) == [5, 6, 7, 3, 2, 1, 0]


def test_what_fell_out_earlier_is_evicted_before_what_fell_out_later() -> None:
    pool = make_pool(8, sliding(4, 4))
    pool.allocate(1, 16)
    for committed in (8, 12, 16):
        commit(pool, 1, "abcd", committed)
    pool.free(1)
    assert granted_next(pool) == [4, 5, 6, 7, 0, 1, 2, 3]


def test_blocks_that_fell_out_make_room_for_the_ones_that_come() -> None:
    # a token reads 4 earlier tokens in at most 2 blocks, and at an edge takes a new block
    pool = make_pool(3, sliding(4, 5))
    pool.allocate(1, 4, prompt_token_count=40)
    for count in range(1, 11):
        assert grow(pool, 1, 4 * count).result is Result.OK
        commit(pool, 1, LETTERS, 4 * count)
    assert pool.blocks.evicted_count == 7
    assert pool.sequences[1].committed_token_count == 40


# -- hits ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("limit", "hit"), [(14, 14), (13, 6), (6, 6), (5, 5), (4, 0)])
def test_a_window_of_4_over_15_tokens_is_hit_at_5_6_and_14(limit: int, hit: int) -> None:
    # Blocks have one token, and blocks 2 to 5 and 11 to 13 are cached. A hit needs the last 3 blocks before its end.
    # Hits of 14, 6 and 5 tokens have them. A hit of 4 lacks block 1, and a hit of 13 lacks block 10.
    pool = make_pool(20, sliding(1, 4))
    computed(pool, 1, LETTERS[:15])
    pool.free(1)
    forget(pool, 0, [0, 1, 6, 7, 8, 9, 10, 14])
    assert pool.match("", d(LETTERS[:limit])) == hit
    grown = pool.allocate(2, limit + 1, d(LETTERS[:limit]))
    assert grown.matched_token_count == hit
    assert blocks_of(pool, 2)[:hit] == ([NULL] * (hit - 3) + [hit - 3, hit - 2, hit - 1] if hit else [])
    invariants.check(pool)


def test_a_hit_holds_its_window_and_leaves_the_rest_cached() -> None:
    pool = make_pool(8, sliding(4, 8))
    computed(pool, 1, "abcd")  # the token at 16 reads tokens 9 to 16
    assert blocks_of(pool, 1) == [NULL, NULL, 2, 3]
    grown = pool.allocate(2, 17, d("abcd"))
    assert grown.matched_token_count == 16
    assert [list(table) for table in grown.blocks] == [[NULL, NULL, 2, 3, 4]]
    assert states(pool) == [1, 1, 3, 3, 2, 0, 0, 0]
    assert pool.allocate(3, 9, d("ab")).blocks[0].tolist() == [0, 1, 5]  # a hit of 8 needs tokens 1 to 7


def test_a_shorter_prefix_is_hit_where_the_window_of_the_longer_has_a_gap() -> None:
    pool = make_pool(10, sliding(4, 8))
    computed(pool, 1, "abcdef")  # a hit of `n` blocks needs blocks n - 2 and n - 1
    pool.free(1)
    forget(pool, 0, [3])
    assert [pool.match("", d("abcdef")[: 32 * count]) for count in range(7)] == [0, 4, 8, 12, 12, 12, 24]


def test_a_chunk_is_hit_from_its_own_beginning_on() -> None:
    pool = make_pool(8, chunked(4, 8))
    pool.allocate(1, 21)  # without digests nothing is hit, so all tokens are computed
    commit(pool, 1, "abcde", 21)
    pool.free(1)
    forget(pool, 0, [0, 1, 2])
    # A hit of 20 tokens needs block 4. Hits of 16 and 8 tokens end at a chunk's edge and need no block. A hit of 12
    # tokens needs block 2, which is gone.
    assert [pool.match("", d("abcde")[: 32 * count]) for count in range(6)] == [0, 0, 8, 8, 16, 20]
    grown = pool.allocate(2, 21, d("abcde"))
    # the new block is 2, emptied last
    assert [list(table) for table in grown.blocks] == [[NULL, NULL, NULL, NULL, 4, 2]]


def test_where_all_layers_are_chunked_a_prompt_begins_at_its_last_chunk_although_nothing_is_cached() -> None:
    pool = make_pool(8, chunked(4, 8))
    assert pool.match("", d("abcd")) == 16
    grown = pool.allocate(1, 18, d("abcd"))
    assert grown.matched_token_count == 16
    assert [list(table) for table in grown.blocks] == [[NULL, NULL, NULL, NULL, 0]]
    invariants.check(pool)


def test_a_chunk_off_the_blocks_needs_the_block_that_it_begins_in() -> None:
    # Chunks have 6 tokens, blocks 4. A hit of 8 tokens ends in the chunk of tokens 6 to 11 and needs token 6, in block
    # 1. A hit of 12 tokens ends at a chunk's edge and needs no block.
    pool = make_pool(8, chunked(4, 6))
    pool.allocate(1, 16)
    commit(pool, 1, "abcd", 16)
    pool.free(1)
    forget(pool, 0, [0, 3])
    assert [pool.match("", d("abcd")[: 32 * count]) for count in range(5)] == [0, 0, 8, 12, 12]
    forget(pool, 0, [1])
    assert [pool.match("", d("abcd")[: 32 * count]) for count in range(5)] == [0, 0, 0, 12, 12]


def test_a_block_that_another_sequence_published_first_is_swapped_in() -> None:
    pool = make_pool(8, sliding(4, 8), sliding(4, 8))
    pool.allocate(1, 8)
    pool.allocate(2, 8)
    assert tables(pool, 2) == [[4, 6], [5, 7]]
    commit(pool, 1, "ab", 8)
    assert commit(pool, 2, "ab", 8).swaps == [(0, 0, 0), (1, 0, 1), (0, 1, 2), (1, 1, 3)]
    assert tables(pool, 2) == [[0, 2], [1, 3]]
    assert counts(pool) == (4, 0, 4)


# -- what admission counts -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block_size", [1, 3, 4])
@pytest.mark.parametrize("window", [1, 2, 4, 5, 9])
@pytest.mark.parametrize("make", [sliding, chunked])
def test_no_sequence_ever_holds_more_than_admission_counted(make: object, window: int, block_size: int) -> None:
    for chunk in (1, 2, 3, 5, 8):
        for first in range(1, chunk + 1):  # `first` shifts the passes relative to the blocks
            pool = make_pool(40, make(block_size, window))  # type: ignore[operator]
            peak = pool.managers[0].peak(30, chunk)
            pool.allocate(1, first, prompt_token_count=30)
            held = []
            for token_count in [*range(first, 30, chunk), 30]:
                assert grow(pool, 1, token_count).result is Result.OK
                held.append(pool.blocks.block_count - pool.blocks.free_count)
                pool.commit(1, token_count, bytes(32) * filled(pool, 1, token_count))
            assert max(held) <= peak, (chunk, first)


@pytest.mark.parametrize(
    ("block_size", "window", "chunk", "peak"),
    [
        (16, 32, 16, 4),  # 31 + 16 = 47 tokens lie in at most four blocks: 1 + 16 + 16 + 14
        (16, 32, 2, 3),  # 31 + 2 = 33 tokens lie in at most three blocks: 1 + 16 + 16
        (16, 17, 1, 2),  # 16 + 1 = 17 tokens lie in at most two blocks: 1 + 16
        (16, 18, 1, 3),  # 17 + 1 = 18 tokens lie in at most three blocks: 1 + 16 + 1
        (1, 4, 1, 4),
        (4, 1, 1, 1),
        (4, 1, 4, 2),
        (16, 4096, 16, 7),  # the window is longer than the prompt, whose 112 tokens take 7 blocks
    ],
)
def test_a_window_and_a_pass_touch_this_many_blocks_at_most(
    block_size: int, window: int, chunk: int, peak: int
) -> None:
    manager = make_pool(1, sliding(block_size, window)).managers[0]
    assert manager.peak(112 if block_size == 16 else 4 * 16, chunk) == peak
