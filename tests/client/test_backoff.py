"""Pauses between retries grow, are never shorter than the server asks for, and have jitter."""

from __future__ import annotations

from quire._transport.backoff import Backoff
from quire._transport.channel import BACKOFF_S, BACKOFF_S_MAX


def test_pauses_grow_up_to_the_longest_and_begin_anew_when_an_attempt_has_helped() -> None:
    backoff = Backoff(0.01, 0.2)
    for _ in range(2):
        for least_s in (0.01, 0.03, 0.09, 0.2, 0.2, 0.2):
            assert least_s <= backoff.next_s() <= least_s * 1.25
        backoff.reset()


def test_pauses_of_calls_are_those_that_grpc_is_told() -> None:
    backoff = Backoff(BACKOFF_S, BACKOFF_S_MAX)
    for least_s in (0.05, 0.15, 0.45, 0.5):
        assert round(least_s, 6) <= round(backoff.next_s(), 6) <= least_s * 1.25


def test_nobody_comes_back_before_the_server_has_asked_for_it() -> None:
    backoff = Backoff(0.01, 0.2)
    assert all(1.0 <= backoff.next_s(1.0) <= 1.25 for _ in range(100))
    assert 0.2 <= backoff.next_s(0.0) <= 0.25


def test_who_failed_together_does_not_come_back_together() -> None:
    assert len({Backoff(0.01, 0.2).next_s() for _ in range(20)}) > 10
