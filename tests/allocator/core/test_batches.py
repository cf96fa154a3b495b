"""Sequences of a batch are looked up again whenever one of them was not live."""

from __future__ import annotations

from array import array

from quire_allocator.core.spec import GrowResult, Result

from tests.allocator.core.pools import make_pool


def test_a_sequence_that_a_batch_lacked_is_found_once_it_is_there() -> None:
    pool = make_pool(4)
    pool.allocate(1, 3)
    ids = array("Q", [1, 2])
    assert pool.grow_many(ids, [4, 4])[1] == [(1, GrowResult(Result.NOT_FOUND))]
    pool.allocate(2, 3)
    grants, others = pool.grow_many(ids, [5, 5])
    assert (grants.rows, others) == ([0, 1], [])


def test_a_batch_that_lacked_a_sequence_names_it_as_new() -> None:
    pool = make_pool(4)
    pool.allocate(1, 3)
    ids = array("Q", [1, 2])
    pool.grow_many(ids, [4, 4])
    assert pool.names_new(ids)


def test_a_batch_whose_sequence_was_freed_does_not_find_it() -> None:
    pool = make_pool(4)
    for sequence_id in (1, 2):
        pool.allocate(sequence_id, 3)
    ids = array("Q", [1, 2])
    assert pool.grow_many(ids, [4, 4])[1] == []
    pool.free(2)
    assert pool.grow_many(ids, [4, 4])[1] == [(1, GrowResult(Result.NOT_FOUND))]
