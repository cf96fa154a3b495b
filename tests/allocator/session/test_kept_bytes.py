"""Tests how many bytes of steps and replies the sessions of one caller keep for replay."""

from __future__ import annotations

import itertools

import pytest
from quire.v1 import _packed_pb2 as packed
from quire.v1 import allocator_pb2 as pb
from quire_allocator.core.ownership.directory import Directory, Ownership
from quire_allocator.core.refusal import Refusal
from quire_allocator.session import kept_bytes
from quire_allocator.session.registry import SessionRegistry
from quire_allocator.session.steps import answer_step
from quire_allocator.wire.translate import pool_spec

from tests.allocator.service.harness import grows, spec
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
    return answer_step(sessions, owner, step, None, 0.0).applied is not None


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
