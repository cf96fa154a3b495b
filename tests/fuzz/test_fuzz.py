"""Sends a short set of malformed messages to the allocator without a network, and shows that the set finds planted
bugs.

`make fuzz COUNT=1000000` runs the long set.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from quire.v1 import allocator_pb2 as pb
from quire_allocator.core.ownership.replay import StepLog
from quire_allocator.core.refusal import Refusal
from quire_allocator.session.staged_report import StagedReport
from quire_allocator.wire import step_apply, step_checks

from tests.fuzz.allocator import Episode, Seen, ViolationError
from tests.fuzz.run import REASONS, run_episode


def test_nothing_is_changed_by_what_is_refused_and_every_reason_is_seen() -> None:
    seen, wanted = Seen(), REASONS - {"FENCED", "TOO_LARGE"}  # These two reasons need thousands of messages.
    for seed in range(1, 21):
        run_episode(seed, seen, messages=300)
        if seed >= 5 and wanted <= set(seen.answers):
            break
    assert wanted <= set(seen.answers)
    assert seen.answers["OK"] > 100


def test_a_seed_repeats_its_messages() -> None:
    first, second = Seen(), Seen()
    for seen in (first, second):
        run_episode(3, seen, messages=150)
    assert first == second


def test_an_operator_may_drop_the_cache_of_any_pool() -> None:
    episode = Episode(random.Random(11), Seen())
    assert episode._call("DropCache", pb.DropCacheRequest(pool="pool")) is not None


def unchecked(*_: Any) -> None:
    """Replaces a check by nothing, as if it had been forgotten."""


def late(check: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a check with a planted bug: it applies a step before refusing it."""

    def apply(self: StepLog, number: int, step: Any) -> Any:
        if number != self.next_step:
            self.next_step += 1
        return check(self, number, step)

    return apply


def too_late(_column: object) -> None:
    raise Refusal("TOO_LARGE", "the answer is too long")  # a planted bug: the step has already been applied


def forgetful(self: StagedReport, *_: Any) -> None:
    raise KeyError("a bug")


PLANTED: dict[str, tuple[Any, str, Any]] = {
    "commits are not counted": (step_checks, "_check_commit", unchecked),
    "a step number is used up by a refusal": (StepLog, "replay", late(StepLog.replay)),
    "a step is refused after it was applied": (step_apply, "pack_column", too_late),
    "a chunk is refused by a crash": (StagedReport, "_add_sequence", forgetful),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_bug_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, attribute, planted = PLANTED[name]
    monkeypatch.setattr(owner, attribute, planted)
    with pytest.raises((ViolationError, AssertionError, LookupError, TypeError, ValueError, Refusal)):
        run_episodes(40)


def run_episodes(count: int) -> None:
    seen = Seen()
    for seed in range(1, count):
        run_episode(seed, seen)
