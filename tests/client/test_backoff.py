"""Pauses grow while nothing helps, and are never none."""

from __future__ import annotations

from quire.session.backoff import Backoff


def test_pauses_grow_up_to_the_longest_and_begin_anew_when_an_attempt_has_helped() -> None:
    backoff = Backoff(0.01, 0.2)
    for _ in range(2):
        for longest_s in (0.01, 0.02, 0.04, 0.08, 0.16, 0.2, 0.2, 0.2):
            assert longest_s / 2 <= backoff.next_s() <= longest_s
        backoff.reset()


def test_who_failed_together_does_not_come_back_together() -> None:
    assert len({Backoff(0.01, 0.2).next_s() for _ in range(20)}) > 10
