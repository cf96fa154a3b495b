"""Invariants of a pool: no owner can break them, and a defect that did is noticed."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from quire_allocator.core.pool import Pool

from tests.allocator.pools import blocks_of, computed, d, make_pool


def test_a_block_never_stands_at_two_positions_even_if_its_owner_repeats_a_digest() -> None:
    pool = make_pool()
    same = d("a") * 2
    pool.allocate(1, 8, same, "")
    pool.commit(1, 8, same)
    assert blocks_of(pool, 1) == [0, 1]
    pool.check_invariants()
    pool.allocate(2, 9, same, "")
    assert blocks_of(pool, 2) == [0, 1, 2]
    pool.check_invariants()


operations = st.tuples(
    st.sampled_from(["allocate", "grow", "commit", "fork", "free"]),
    st.integers(0, 12),
    st.integers(1, 24),
    st.lists(st.sampled_from([b"a" * 32, b"b" * 32, b"c" * 32]), max_size=6),
)


@given(st.lists(operations, min_size=8, max_size=40), st.sampled_from([1, 2]))
@settings(max_examples=300, deadline=None)
def test_no_digest_that_an_owner_could_make_up_breaks_an_invariant(
    steps: list[tuple[str, int, int, list[bytes]]], group_count: int
) -> None:
    pool = make_pool(7, block_size=2, group_count=group_count)
    for name, choice, token_count, digests in steps:
        live = list(pool.sequences) or [0]
        sequence_id = live[choice % len(live)]
        if name == "allocate":
            pool.allocate(pool.last_sequence_id + 1, token_count, digests, "")
        elif name == "grow":
            pool.grow(sequence_id, token_count)
        elif name == "commit" and pool.sequences:
            until = min(token_count, pool.sequences[sequence_id].token_count)
            filled = pool.filled_block_count(sequence_id, until)
            assert filled is not None
            if filled >= 0:
                pool.commit(sequence_id, until, (digests * 24 or [bytes(32)] * 24)[:filled])
        elif name == "fork":
            pool.fork(sequence_id, pool.last_sequence_id + 1)
        else:
            pool.free(sequence_id)
        pool.check_invariants()


def corrupt_count(pool: Pool) -> None:
    pool.blocks.reference_counts[0] += 1


def corrupt_free_list(pool: Pool) -> None:
    pool.blocks.take(1)


def corrupt_table(pool: Pool) -> None:
    pool.sequences[1].tables[0].reverse()


def corrupt_progress(pool: Pool) -> None:
    pool.sequences[1].committed_token_count = 99


def corrupt_publication(pool: Pool) -> None:
    pool.sequences[1].committed_token_count += 4


@pytest.mark.parametrize(
    "corrupt", [corrupt_count, corrupt_free_list, corrupt_table, corrupt_progress, corrupt_publication]
)
def test_a_corrupted_pool_is_noticed(corrupt: Any) -> None:
    pool = make_pool()
    computed(pool, 1, "ab")
    pool.grow(1, 12)
    pool.fork(1, 2)
    pool.check_invariants()
    corrupt(pool)
    with pytest.raises(AssertionError):
        pool.check_invariants()


def test_a_block_pool_notices_an_index_that_disagrees_with_its_blocks() -> None:
    pool = make_pool()
    computed(pool, 1, "a")
    pool.blocks._index.clear()  # the defect
    with pytest.raises(AssertionError, match="index and keys"):
        pool.blocks.check_invariants()
