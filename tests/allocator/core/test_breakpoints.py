"""Breakpoints of an owner: the first prompt that diverges there hits."""

from __future__ import annotations

import pytest
from quire_allocator.core.readers import invariants
from quire_allocator.core.spec import GroupSpec, Result

from tests.allocator.core.pools import commit, computed, d, full, grow, make_pool, sliding, state

MINUTE_MS = 60_000
STATES = (full(4), *[state(1024)] * 30)


@pytest.mark.parametrize(("given", "matched"), [((), 0), ((9,), 8), ((5, 9), 8)])
def test_a_state_at_a_breakpoint_serves_the_first_prompt_that_parts_there(given: tuple[int, ...], matched: int) -> None:
    pool = make_pool(400, *STATES)
    told = pool.allocate(1, 33, d("abcdefgh"), breakpoints=given).stops
    assert {stop // 4 * 4 for stop in given} <= set(told)
    for end in (*told, 33):  # Commits like an owner that ends its passes at stops.
        commit(pool, 1, "abcdefgh", end, keep=end)
        assert grow(pool, 1, 33).result is Result.OK
    pool.free(1, MINUTE_MS, given[-1] if given else 0)
    invariants.check(pool)
    assert pool.match("", d("abxy")) == matched


def test_a_window_before_a_breakpoint_stays_longer_than_others() -> None:
    pool = make_pool(48, full(4), sliding(4, 8))
    computed(pool, 1, "abcdefgh", tokens=1, breakpoints=(16,))
    computed(pool, 2, "ijklmnop", tokens=1)
    pool.free(1)
    pool.free(2)
    pool.allocate(3, 49)
    assert (pool.match("", d("abcdwxyz")), pool.match("", d("ijklwxyz"))) == (16, 0)


@pytest.mark.parametrize(("groups", "stops"), [((full(4),), ()), ((full(4), sliding(4, 8)), (12, 32))])
def test_breakpoints_within_the_hit_and_behind_the_end_have_no_effect(
    groups: tuple[GroupSpec, ...], stops: tuple[int, ...]
) -> None:
    pool = make_pool(400, *groups)
    computed(pool, 1, "ab")
    pool.free(1)
    answer = pool.allocate(2, 34, d("abcdefgh"), breakpoints=(5, 9, 13, 33))
    assert (answer.matched_token_count, answer.stops) == (8, stops)
