"""Evictions are counted by the namespace that lost the blocks, and by the namespace that needed them."""

from __future__ import annotations

from array import array

import pytest
from quire_allocator.core.drop import drop_cached
from quire_allocator.core.pool import Pool
from quire_allocator.core.readers import invariants
from quire_allocator.core.spec import GroupSpec, Quota, Result

from tests.allocator.core.pools import d, full, make_pool, sliding


def leave(pool: Pool, letters: str, namespace: str) -> None:
    """Computes these blocks of 4 tokens in a new sequence, and frees it."""
    sequence_id, count = pool.last_sequence_id + 1, 4 * len(letters)
    assert pool.allocate(sequence_id, count, d(letters), namespace).result is Result.OK
    pool.commit(sequence_id, count, d(letters))
    pool.free(sequence_id)


def needs(pool: Pool) -> tuple[int, int, dict[tuple[str, str], int]]:
    """Returns the number of evicted blocks: all, those beyond quotas, and those of other namespaces."""
    blocks = pool.blocks
    invariants.check(pool)
    assert blocks.foreign_evicted_count == sum(blocks.foreign_evictions.values())
    return blocks.evicted_count, blocks.quota_evicted_count, blocks.foreign_evictions


@pytest.mark.parametrize("groups", [(full(4),), (full(4), sliding(4, 64))], ids=["full", "full and sliding"])
def test_a_new_sequence_takes_blocks_of_its_own_namespace_and_of_others(groups: tuple[GroupSpec, ...]) -> None:
    width = len(groups)
    pool = make_pool(4 * width, *groups)
    leave(pool, "ab", "blue")
    leave(pool, "cd", "red")
    pool.allocate(pool.last_sequence_id + 1, 12, namespace="red")
    assert needs(pool) == (3 * width, 0, {("blue", "red"): 2 * width})


def test_what_a_namespace_evicts_of_its_own_is_nobody_elses() -> None:
    pool = make_pool(4)
    leave(pool, "abcd", "blue")
    leave(pool, "xyz", "blue")
    assert needs(pool) == (3, 0, {})


def test_each_row_of_a_decoding_batch_is_taken_for_its_own_sequence() -> None:
    pool = make_pool(6)
    for sequence_id, namespace in ((1, "red"), (2, "green")):
        pool.allocate(sequence_id, 4, namespace=namespace)
    leave(pool, "abcd", "blue")
    grants, others = pool.grow_many(array("Q", [1, 2]), [8, 8])
    assert (grants.rows, others) == ([0, 1], [])
    assert needs(pool) == (2, 0, {("blue", "red"): 1, ("blue", "green"): 1})


def test_a_quota_is_no_need_and_a_drop_is_no_eviction() -> None:
    pool = make_pool(8, quotas=(Quota("blue", cached_blocks_max=1),))
    leave(pool, "abc", "blue")
    leave(pool, "xy", "red")
    assert needs(pool) == (2, 2, {})
    for namespace in ("blue", "red", None):
        drop_cached(pool, namespace)
    assert needs(pool) == (2, 2, {})
    assert pool.blocks.free_count == pool.blocks.empty_count == 8
