"""Several types of group in one pool: a hit is as long as all of them can serve. Numbers worked out by hand."""

from __future__ import annotations

import pytest
from quire_allocator.core.pool import Pool
from quire_allocator.core.readers import invariants
from quire_allocator.core.spec import NULL_BLOCK, Result

from tests.allocator.core.pools import (
    chunked,
    commit,
    computed,
    counts,
    d,
    forget,
    full,
    granted_next,
    grow,
    make_pool,
    sliding,
    state,
    tables,
)

NULL = NULL_BLOCK
LETTERS = "abcdefghijklmnopqrstuvwxyz"


def matches(pool: Pool, letters: str) -> list[int]:
    """Returns the hit tokens of each prefix of a text, one digest block after another."""
    return [pool.match("", d(letters[:count])) for count in range(len(letters) + 1)]


def test_blocks_of_a_position_are_handed_out_kind_after_kind_and_tables_keep_the_order_of_the_groups() -> None:
    pool = make_pool(12, sliding(4, 8), full(4), sliding(4, 8))
    pool.allocate(1, 8)
    assert tables(pool, 1) == [[2, 4], [0, 1], [3, 5]]
    grown = grow(pool, 1, 12)
    assert [list(blocks) for blocks in grown.blocks] == [[7], [6], [8]]
    assert tables(pool, 1) == [[2, 4, 7], [0, 1, 6], [3, 5, 8]]


def test_growing_past_one_kinds_edge_only_grants_to_that_kind() -> None:
    pool = make_pool(12, full(8), sliding(4, 8))
    pool.allocate(1, 4)
    assert tables(pool, 1) == [[0], [1]]
    grown = grow(pool, 1, 5)
    assert [list(blocks) for blocks in grown.blocks] == [[], [2]]
    assert grow(pool, 1, 8).blocks == ()


def test_full_and_sliding_agree_on_the_longest_prefix_that_both_have() -> None:
    # Blocks have one token. Full attention has blocks 0 to 6. The window of 4 needs the last 3 blocks before a hit's
    # end, and has blocks 2 to 5.
    pool = make_pool(40, full(1), sliding(1, 4))
    computed(pool, 1, LETTERS[:7])
    pool.free(1)
    forget(pool, 1, [0, 1, 6])
    assert pool.match("", d(LETTERS[:7])) == 6
    assert pool.allocate(2, 8, d(LETTERS[:7])).matched_token_count == 6
    assert tables(pool, 2)[0][:6] == [0, 1, 2, 3, 4, 5]
    assert tables(pool, 2)[1][:3] == [NULL] * 3
    invariants.check(pool)


def test_three_kinds_are_asked_again_until_none_of_them_gives_way() -> None:
    # Blocks have one token. Full attention has all 12 blocks. A window of 3 needs the last two blocks before a hit's
    # end. It has blocks 2, 3, 8 and 9, so it can serve 4 or 10 tokens. Chunks of 4 need all tokens since the last
    # multiple of 4. Block 8 is missing, so they cannot serve 10, only 8. The window cannot serve 8, so 4 is left.
    pool = make_pool(60, full(1), sliding(1, 3), chunked(1, 4))
    computed(pool, 1, LETTERS[:12])
    pool.free(1)
    forget(pool, 1, [0, 1, 4, 5, 6, 7, 10, 11])
    forget(pool, 2, [8])
    assert pool.match("", d(LETTERS[:12])) == 4
    assert pool.allocate(2, 13, d(LETTERS[:12])).matched_token_count == 4
    invariants.check(pool)


def test_a_pool_without_full_attention_is_hit_by_the_same_rule() -> None:
    pool = make_pool(60, sliding(1, 3), chunked(1, 4))
    computed(pool, 1, LETTERS[:12])
    pool.free(1)
    forget(pool, 0, [0, 1, 4, 5, 6, 7, 10, 11])
    forget(pool, 1, [8])
    assert matches(pool, LETTERS[:12]) == [0, 0, 0, 0, 4, 4, 4, 4, 4, 4, 4, 4, 4]


def test_a_long_prompt_is_hit_at_its_end_but_no_longer_where_its_windows_were_evicted() -> None:
    pool = make_pool(12, full(4), sliding(4, 5))
    computed(pool, 1, "abcd")  # full attention has blocks 0 to 3, the window 4 to 7; token 16 reads only block 7
    assert tables(pool, 1) == [[0, 1, 2, 3], [NULL, NULL, NULL, 7]]
    assert matches(pool, "abcd") == [0, 4, 8, 12, 16]
    forget(pool, 1, [0, 1, 2])
    assert matches(pool, "abcd") == [0, 0, 0, 0, 16]


def test_different_block_sizes_are_hit_at_edges_of_all_of_them() -> None:
    # Digests cover 2 tokens. Full attention has blocks of 4, and a window of 5 has blocks of 2.
    pool = make_pool(40, full(4), sliding(2, 5))
    computed(pool, 1, "abcdef")
    assert matches(pool, "abcdef") == [0, 0, 4, 4, 8, 8, 12]
    grown = pool.allocate(2, 11, d("abcde"))
    assert grown.matched_token_count == 8
    assert [len(table) for table in grown.blocks] == [3, 6]
    assert list(grown.blocks[1][:2]) == [NULL, NULL]  # token 8 reads tokens 4 to 8, none in these two blocks
    invariants.check(pool)


def test_a_freed_sequence_leaves_kind_after_kind_and_what_fell_out_before_goes_first() -> None:
    pool = make_pool(8, full(4), sliding(4, 4), retention="dense")
    computed(pool, 1, "abcd")
    assert tables(pool, 1) == [[0, 1, 2, 3], [NULL, NULL, NULL, 7]]
    pool.free(1)
    assert granted_next(pool) == [6, 5, 4, 3, 2, 1, 0, 7]


def test_no_group_grows_if_one_of_them_cannot() -> None:
    pool = make_pool(5, full(4), sliding(4, 8))
    pool.allocate(1, 8)
    answer = grow(pool, 1, 9)
    # 9 tokens need 3 blocks in each group, and the pool has 5
    assert (answer.result, answer.shortfall) == (Result.TOO_LONG, 0)
    pool = make_pool(7, full(4), sliding(4, 8))
    pool.allocate(1, 8)
    pool.allocate(2, 1)
    answer = grow(pool, 1, 9)
    assert (answer.result, answer.shortfall) == (Result.NO_SPACE, 1)
    assert counts(pool) == (1, 0, 6)


def test_eight_identical_prompts_with_every_kind_of_group_share_all_that_can_be_shared() -> None:
    # 17 tokens are 4 full blocks and one token. The eight sequences share full blocks, and each has a block of its own
    # for token 16. Full attention shares 4 blocks. The window of 8 shares 2, because token 16 reads tokens 9 to 16.
    # Chunks of 8 share none, because token 16 begins a chunk. Each sequence has one state.
    pool = make_pool(80, full(4), sliding(4, 8), chunked(4, 8), state(4))
    pool.allocate(1, 16, d("abcd"), prompt_token_count=17)
    commit(pool, 1, "abcd", 16)
    grow(pool, 1, 17)
    for sequence_id in range(2, 9):
        grown = pool.allocate(sequence_id, 17, d("abcd"))
        assert grown.matched_token_count == 16
    invariants.check(pool)
    assert counts(pool)[2] == (4 + 8) + (2 + 8) + 8 + 8
    assert len(tables(pool, 8)[3]) == 1


@pytest.mark.parametrize("group_count", [1, 3])
def test_blocks_of_one_token_work_with_every_kind(group_count: int) -> None:
    groups = [full(1), sliding(1, 3), chunked(1, 2)] * group_count
    pool = make_pool(30 * group_count, *groups)
    computed(pool, 1, "abcde")
    assert matches(pool, "abcde") == [0, 1, 2, 3, 4, 5]
    # After 5 tokens, full attention holds 5 blocks. The next token reads tokens 3 and 4 in a window of 3, and token 4
    # in chunks of 2.
    assert counts(pool)[2] == (5 + 2 + 1) * group_count
