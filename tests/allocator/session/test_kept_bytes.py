"""Tests what the sessions of one caller keep: bytes of steps and replies for replay, live sequences, events."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from quire.v1 import _packed_pb2 as packed
from quire.v1 import allocator_pb2 as pb
from quire_allocator import limits
from quire_allocator.core.ownership.directory import Directory, Ownership
from quire_allocator.core.refusal import Refusal
from quire_allocator.session import kept_bytes
from quire_allocator.session.registry import SessionRegistry
from quire_allocator.session.steps import answer_step
from quire_allocator.wire.translate import pool_spec

from tests.allocator.core.compiled import IS_COMPILED
from tests.allocator.service.harness import commits, d, grows, spec
from tests.simulation.world import Quiet

SIZE = kept_bytes.SMALL_BYTES + 1_000


@pytest.fixture
def sessions(monkeypatch: pytest.MonkeyPatch) -> SessionRegistry:
    monkeypatch.setattr(kept_bytes.limits, "KEPT_BYTES_MAX", 5 * SIZE)
    ids = itertools.count(1)
    directory = Directory(lease_s=30.0, pools_max=8)
    return SessionRegistry(directory, Quiet(), new_session_id=lambda: next(ids).to_bytes(16, "big"))


def opened(sessions: SessionRegistry, name: str, caller: str, window: int) -> Ownership:
    owner, _, _ = sessions.directory.attach(
        name=name, spec=pool_spec(spec()), incarnation=b"1" * 16, epoch=1, window=window, resume_session=b"",
        stream=None, now=0.0, caller=caller,
    )  # fmt: skip
    sessions.directory.open(owner, spec=owner.spec, session_id=sessions.new_session_id(), last_step=0)
    return owner


def take(sessions: SessionRegistry, owner: Ownership, number: int, ack: int = 0, size: int = SIZE) -> bool:
    """Sends a step of about `size` bytes. Returns whether it was applied now."""
    message = pb.Step(session_id=owner.session_id, number=number, ack=ack, grows=grows((number, 1, b"")))
    length = size - message.ByteSize()
    message.MergeFromString(b"\xfa\x7f" + bytes([length & 127 | 128, length >> 7]) + b"j" * length)
    step = packed.Step.FromString(message.SerializeToString())
    answer, applied = answer_step(sessions, owner, step, None, 0.0)
    if applied is not None:
        sessions.kept_bytes.count(owner, number, step.ByteSize() + answer.ByteSize())
    return applied is not None


def test_a_caller_that_keeps_too_many_bytes_loses_replies_and_others_keep_theirs(sessions: SessionRegistry) -> None:
    first, second, other = (opened(sessions, name, name[0], window=8) for name in ("a1", "a2", "b1"))
    assert [take(sessions, first, number) for number in range(1, 5)] == [True] * 4
    assert take(sessions, other, 1)
    assert take(sessions, second, 1)
    with pytest.raises(Refusal, match="step 1 is neither"):
        take(sessions, second, 1)
    assert not take(sessions, other, 1)
    assert [take(sessions, first, number) for number in range(1, 5)] == [False] * 4
    assert take(sessions, second, 2, size=1_000)
    assert not take(sessions, second, 2, size=1_000)


def test_replies_that_are_acknowledged_or_beyond_the_window_count_no_more(sessions: SessionRegistry) -> None:
    owner = opened(sessions, "a1", "a", window=2)
    for number in range(1, 9):
        assert take(sessions, owner, number)
        assert not take(sessions, owner, number)
        assert sessions.kept_bytes.shares.count >> 13 == min(number, 2)
    assert take(sessions, owner, 9, ack=8, size=500)
    assert sessions.kept_bytes.shares.count == 0


def test_sessions_that_ended_leave_their_bytes_to_their_caller(sessions: SessionRegistry) -> None:
    gone = opened(sessions, "a1", "a", window=8)
    for number in range(1, 5):
        take(sessions, gone, number)
    sessions.drop(gone)
    owner = opened(sessions, "a1", "a", window=8)
    assert take(sessions, owner, 1)
    assert not take(sessions, owner, 1)


def step(sessions: SessionRegistry, owner: Ownership, **phases: Any) -> None:
    number = owner.steps.next_step
    message = pb.Step(session_id=owner.session_id, number=number, **phases)
    answer_step(sessions, owner, packed.Step.FromString(message.SerializeToString()), None, 0.0)


@pytest.mark.skipif(IS_COMPILED, reason="constants of extension modules cannot be replaced")
def test_pools_of_one_caller_have_a_limit_of_live_sequences(
    sessions: SessionRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "SEQUENCES_OF_CALLER_MAX", 10)
    monkeypatch.setattr(limits, "SEQUENCES_UNSHARED", 2)
    first, second, other = (opened(sessions, name, name[0], window=1) for name in ("a1", "a2", "b1"))
    step(sessions, first, grows=grows((1, 1, b"")))
    step(sessions, first, forks=pb.ForkPhase(parents=[1] * 7, children=range(2, 9)))
    for owner in (second, other):
        step(sessions, owner, grows=grows((1, 1, b""), (2, 1, b"")))
    with pytest.raises(Refusal, match="may have 10 live sequences, not 11"):
        step(sessions, second, grows=grows((3, 1, b"")))
    step(sessions, other, grows=grows((3, 1, b"")))
    step(sessions, first, frees=pb.FreePhase(sequences=[1]))
    step(sessions, second, grows=grows((3, 1, b"")))


def test_events_of_an_owner_that_never_acknowledges_are_published_when_its_window_has_passed(
    sessions: SessionRegistry,
) -> None:
    owner = opened(sessions, "a1", "a", window=2)
    for sequence in range(1, 50):
        digest = d(chr(sequence + 64))
        step(sessions, owner, grows=grows((sequence, 4, b"")))
        step(sessions, owner, commits=commits((sequence, 4, digest)), frees=pb.FreePhase(sequences=[sequence]))
    assert len(owner.pool.log._recorded) <= 4
    assert owner.pool.log.last_cursor > 40
