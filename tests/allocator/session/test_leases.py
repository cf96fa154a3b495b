"""A lease ends when its owner was silent, not when this process did not listen."""

from __future__ import annotations

import pytest
from quire_allocator.core.ownership.directory import Directory, Ownership
from quire_allocator.session.lease_watch import LeaseWatch

from tests.allocator.core.test_directory import attach

LEASE_S, PERIOD_S = 10.0, 0.5


@pytest.fixture
def directory() -> Directory:
    return Directory(lease_s=LEASE_S, pools_max=2)


@pytest.fixture
def owner(directory: Directory) -> Ownership:
    return attach(directory)[0]


@pytest.fixture
def watch(directory: Directory, owner: Ownership) -> LeaseWatch:
    return LeaseWatch(directory, directory.expire, PERIOD_S, 0.0)


def test_a_silent_owner_loses_its_pool_at_most_two_checks_after_its_lease(
    directory: Directory, watch: LeaseWatch
) -> None:
    now = 0.0
    while directory.expired_count == 0:
        now += PERIOD_S
        watch.check(now)
    assert LEASE_S < now <= LEASE_S + 2 * PERIOD_S


def test_what_came_before_the_end_of_a_lease_may_be_read_after_it(
    directory: Directory, watch: LeaseWatch, owner: Ownership
) -> None:
    for number in range(1, 21):
        watch.check(number * PERIOD_S)
    assert directory.expired_count == 0
    directory.renew(owner, 10.1)  # the message came in time, but the server handled other messages first
    watch.check(10.5)
    watch.check(11.0)
    assert directory.expired_count == 0


@pytest.mark.parametrize("stalls_s", [[60.0], [3.0] * 5, [0.25] * 80])
def test_time_in_which_this_process_stood_still_counts_for_nobody(
    directory: Directory, watch: LeaseWatch, stalls_s: list[float]
) -> None:
    now = 0.0
    for stall_s in stalls_s:
        now += PERIOD_S + stall_s
        watch.check(now)
    listened_s = PERIOD_S * len(stalls_s)
    assert (directory.expired_count == 0) == (listened_s <= LEASE_S + PERIOD_S)
