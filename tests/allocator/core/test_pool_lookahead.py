"""Blocks granted ahead, kept or given back with a commit. 8 blocks of 4 tokens, one group unless said otherwise."""

from __future__ import annotations

import pytest
from quire_allocator.core.spec import Copy, GrowResult, Result

from tests.allocator.core.pools import blocks_of, commit, counts, d, full, grow, make_pool, sliding, tables


@pytest.mark.parametrize(
    ("keep", "token_count", "blocks"),
    [
        (0, 14, [0, 1, 2, 3]),  # the sequence gives nothing back
        (1, 9, [0, 1, 2]),  # a sequence keeps at least its committed length
        (9, 9, [0, 1, 2]),
        (12, 12, [0, 1, 2]),
        (13, 13, [0, 1, 2, 3]),
        (14, 14, [0, 1, 2, 3]),
        (99, 14, [0, 1, 2, 3]),  # a sequence keeps at most its granted length
    ],
)
def test_a_commit_gives_back_what_is_not_to_be_kept(keep: int, token_count: int, blocks: list[int]) -> None:
    pool = make_pool()
    pool.allocate(1, 6, d("a"))
    grow(pool, 1, 14)
    commit(pool, 1, "ab", 9, keep=keep)
    assert blocks_of(pool, 1) == blocks
    assert pool.sequences[1].token_count == token_count
    assert counts(pool) == (8 - len(blocks), 0, len(blocks))


def test_what_was_given_back_is_granted_next_in_the_order_of_the_table() -> None:
    pool = make_pool()
    pool.allocate(1, 20)
    commit(pool, 1, "a", 5, keep=5)
    assert list(pool.blocks.empty) == [2, 3, 4, 5, 6, 7]
    assert grow(pool, 1, 9).blocks[0].tolist() == [2]


def test_draft_tokens_are_never_published() -> None:
    pool = make_pool()
    pool.allocate(1, 12, d("abc"))  # all three blocks are written, drafts in the last two
    commit(pool, 1, "ab", 7, keep=8)
    assert pool.match("", d("abc")) == 4
    grow(pool, 1, 12)
    commit(pool, 1, "axy", 12)
    assert [pool.match("", d(text)) for text in ("abc", "axy")] == [4, 12]


def test_after_giving_back_a_half_filled_block_that_a_fork_shares_is_copied() -> None:
    pool = make_pool()
    pool.allocate(1, 8)
    commit(pool, 1, "a", 6)
    pool.fork(1, 2)
    assert grow(pool, 1, 8) == GrowResult(Result.OK)  # the parent was granted these tokens before the fork
    commit(pool, 1, "a", 6, keep=6)
    assert pool.sequences[1].limit == 6
    assert grow(pool, 1, 7).copies == [Copy(1, 2)]


def test_lookahead_is_given_back_by_every_group() -> None:
    pool = make_pool(20, full(2), sliding(4, 4), full(4))
    pool.allocate(1, 15)
    assert [len(table) for table in tables(pool, 1)] == [8, 4, 4]
    commit(pool, 1, "abc", 7, keep=7)
    assert [len(table) for table in tables(pool, 1)] == [4, 2, 2]
    # the next token, at 7, reads tokens 4 to 7, so the window's first block is only cached
    assert counts(pool) == (20 - 4 - 1 - 2 - 1, 1, 7)


def test_a_grant_for_several_tokens_ahead_is_used_up_without_another() -> None:
    pool = make_pool()
    pool.allocate(1, 3)
    granted = pool.granted_block_count
    assert grow(pool, 1, 8).blocks[0].tolist() == [1]
    assert [grow(pool, 1, count) for count in (4, 8)] == [GrowResult(Result.OK)] * 2
    assert pool.granted_block_count == granted + 1
