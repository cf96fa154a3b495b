"""Tests how a server divides its places among callers."""

from __future__ import annotations

import pytest
from quire._serving.caller_shares import CallerShares


@pytest.mark.parametrize(("callers", "each"), [(1, 30), (2, 20), (3, 15), (5, 10)])
def test_callers_that_want_all_have_equal_parts_and_leave_one_part_free(callers: int, each: int) -> None:
    places = CallerShares(30)
    is_wanted = True
    while is_wanted:
        is_wanted = sum(places.take(caller) for caller in range(callers)) > 0
    assert [places.held_by(caller) for caller in range(callers)] == [each] * callers
    assert places.count == callers * each
    assert places.take("a newcomer")


def test_as_many_callers_as_places_have_one_each() -> None:
    places = CallerShares(2)
    assert all(places.take(caller) for caller in range(4))
    assert not places.take(4)
    places.leave(0)
    assert places.take(4)


def test_several_are_taken_together_or_not_at_all() -> None:
    places = CallerShares(4)
    assert not places.take("a", 5)
    assert places.count == 0
    assert places.take("a", 4)
    assert not places.take("a")
    assert places.take("b", 2)
    for caller in "aaaabb":
        places.leave(caller)
    assert (places.count, places.held_by("a"), places.held_by("b")) == (0, 0, 0)


def test_no_caller_has_more_than_each_may_have() -> None:
    places = CallerShares(4, 3)
    assert [places.take("a") for _ in range(4)] == [True, True, True, False]
    assert places.held_by("a") == places.count == 3
    assert places.take("b", 3)
