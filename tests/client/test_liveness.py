"""Only time when this process was running counts as silence of the peer."""

from __future__ import annotations

from quire.session.liveness import Silence


def test_silence_is_the_time_since_anything_was_heard() -> None:
    silence = Silence(100.0)
    assert [silence.tick(100.0 + number / 4, 0.25) for number in (1, 2, 3)] == [0.25, 0.5, 0.75]
    silence.heard()
    assert silence.tick(101.0, 0.25) == 0.25


def test_a_tick_that_is_a_little_late_counts_in_full() -> None:
    silence = Silence(100.0)
    assert silence.tick(100.4, 0.25) == 0.4000000000000057


def test_a_process_that_stood_still_for_a_minute_has_heard_half_a_second_of_silence() -> None:
    silence = Silence(100.0)
    silence.tick(100.25, 0.25)
    assert silence.tick(160.25, 0.25) == 0.75
    silence.heard()  # The process reads the messages that arrived during the pause.
    assert silence.tick(160.5, 0.25) == 0.25
