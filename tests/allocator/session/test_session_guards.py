"""Limits of one owner's influence on others, and of a defect's influence on the process: the allocator's side alone."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Iterator
from typing import Any

import pytest
from quire.protocol.state_digest import STATE_DIGEST_STEPS
from quire.protocol.steps import StepBuilder
from quire.session.owner import PoolOwner
from quire.v1 import allocator_pb2 as pb
from quire_allocator import limits
from quire_allocator.core.ownership.directory import Directory, Ownership
from quire_allocator.core.refusal import Refusal
from quire_allocator.session.machine import Phase, SessionMachine
from quire_allocator.session.registry import SessionRegistry

from tests.simulation.histories import pool_spec
from tests.simulation.world import Quiet

SPEC = pool_spec("full", 32)


@pytest.fixture
def witness() -> Quiet:
    return Quiet()


@pytest.fixture
def sessions(witness: Quiet) -> SessionRegistry:
    ids: Iterator[int] = itertools.count(1)
    directory = Directory(lease_s=30.0, pools_max=8)
    return SessionRegistry(directory, witness, new_session_id=lambda: next(ids).to_bytes(16, "big"))


def owner(name: str, last_step: int = 0) -> PoolOwner:
    side = PoolOwner(name, SPEC, incarnation=name.encode().ljust(16), window=1)
    side.last_step = last_step
    return side


def talk(stream: SessionMachine, side: PoolOwner, now: float = 0.0) -> None:
    while side.outbox:
        for reply in stream.receive(side.outbox.popleft(), now):
            side.receive(reply)


def attached(sessions: SessionRegistry, name: str) -> tuple[SessionMachine, PoolOwner]:
    side, stream = owner(name), SessionMachine(sessions)
    side.attach()
    talk(stream, side)
    return stream, side


def claimed(sessions: SessionRegistry, name: str, now: float = 0.0) -> SessionMachine:
    """Returns a stream that occupies one of the places for reports, and has sent no part of its report."""
    side, stream = owner(name, last_step=7), SessionMachine(sessions)
    side.attach()
    stream.receive(side.outbox.popleft(), now)
    return stream


def allocate(side: PoolOwner, sequence_id: int, token_count: int = 5) -> None:
    step = StepBuilder()
    step.allocate(sequence_id, token_count)
    side.submit(step)


def refusal_within(step_count: int, stream: SessionMachine, side: PoolOwner) -> str:
    """Returns why one of `step_count` empty steps is refused; empty if none is."""
    try:
        for _ in range(step_count):
            side.submit(StepBuilder())
            talk(stream, side)
    except Refusal as refusal:
        return refusal.reason
    return ""


def pool_of(stream: SessionMachine) -> Ownership:
    assert stream.owner is not None
    return stream.owner


# -- a defect of ours stops its pool and nothing else ------------------------------------------------------------------


def test_a_block_that_is_given_back_twice_is_noticed_without_counting_all_blocks(sessions: SessionRegistry) -> None:
    stream, side = attached(sessions, "a")
    allocate(side, 1)
    talk(stream, side)
    pool_of(stream).pool.blocks.give_back(array("I", [0]))  # plants a defect: an extra give-back
    assert refusal_within(limits.CHANGES_PER_CHECK, stream, side) == "POOL_QUARANTINED"


@pytest.mark.parametrize("count", ["held", "cached"])
def test_a_count_of_a_namespace_that_is_wrong_is_noticed(sessions: SessionRegistry, count: str) -> None:
    stream, side = attached(sessions, "a")
    allocate(side, 1)
    talk(stream, side)
    blocks = pool_of(stream).pool.blocks
    blocks.check_counts()
    (space,) = blocks.namespaces.values()
    setattr(space.scopes[0], count, getattr(space.scopes[0], count) + 1)
    with pytest.raises(AssertionError, match=f"count as {count}"):
        blocks.check_counts()


def test_a_defect_in_the_digest_of_the_state_stops_the_pool(sessions: SessionRegistry, witness: Quiet) -> None:
    stream, side = attached(sessions, "a")
    sequences: dict[int, Any] = pool_of(stream).pool.sequences
    sequences[1] = None  # plants a defect: a sequence without its data
    assert refusal_within(STATE_DIGEST_STEPS, stream, side) == "POOL_QUARANTINED"
    assert [name for name, _ in witness.quarantined_pools] == ["a"]


# -- places for reports ------------------------------------------------------------------------------------------------


def test_who_sends_no_report_loses_its_place_whatever_else_it_sends(sessions: SessionRegistry) -> None:
    idle = [claimed(sessions, f"idle-{number}") for number in range(limits.REPORTS_MAX)]
    for now in range(int(limits.REPORT_PAUSE_S)):
        for stream in idle:
            stream.receive(pb.SessionRequest(heartbeat=pb.Heartbeat()), float(now))
        sessions.expire(float(now))
        with pytest.raises(Refusal):
            claimed(sessions, "honest", float(now))
    sessions.expire(limits.REPORT_PAUSE_S)
    for stream in idle:
        assert stream.ending is not None
        assert stream.ending.reason == "IDLE"
        stream.close()  # In a server, the handler of the stream makes this call.
    assert claimed(sessions, "honest", limits.REPORT_PAUSE_S).phase is Phase.REPORTING


def test_a_long_report_keeps_its_place_while_it_comes(sessions: SessionRegistry) -> None:
    stream = claimed(sessions, "long")
    for number in range(4):
        now = 0.9 * limits.REPORT_PAUSE_S * (number + 1)
        part = pb.ReportedSequence(sequence_id=number + 1, tables=[pb.BlockTable()])
        chunk = pb.ReportChunk(number=number, namespaces=[""], sequences=[part])
        stream.receive(pb.SessionRequest(report_chunk=chunk), now)
        sessions.expire(now)
    assert stream.ending is None


def test_an_attach_that_has_to_wait_for_a_place_claims_nothing(sessions: SessionRegistry) -> None:
    for number in range(limits.REPORTS_MAX):
        claimed(sessions, f"staging-{number}")
    with pytest.raises(Refusal) as caught:
        claimed(sessions, "pool")
    assert caught.value.reason == "REPORT_ADMISSION"
    rival, stream = PoolOwner("pool", SPEC, incarnation=b"another".ljust(16), window=1), SessionMachine(sessions)
    rival.attach()
    talk(stream, rival)
    assert stream.phase is Phase.OPEN


def test_an_attach_that_has_to_wait_for_a_place_leaves_the_older_stream(sessions: SessionRegistry) -> None:
    stream, side = attached(sessions, "pool")
    allocate(side, 1)
    talk(stream, side)
    for number in range(limits.REPORTS_MAX):
        claimed(sessions, f"staging-{number}")
    again = pb.Attach(version=3, pool="pool", incarnation=b"pool".ljust(16), epoch=2, window=1, last_step=1)
    again.spec.CopyFrom(SPEC)
    with pytest.raises(Refusal):
        SessionMachine(sessions).receive(pb.SessionRequest(attach=again), 0.0)
    assert stream.ending is None
    allocate(side, 2)
    talk(stream, side)
    assert sorted(pool_of(stream).pool.sequences) == [1, 2]


# -- leases ------------------------------------------------------------------------------------------------------------


def test_a_refused_step_renews_no_lease(sessions: SessionRegistry) -> None:
    stream, side = attached(sessions, "pool")
    before = pool_of(stream).lease_end
    wrong = pb.Step(session_id=b"x" * 16, number=1)
    with pytest.raises(Refusal):
        stream.receive(pb.SessionRequest(step=wrong), 5.0)
    assert pool_of(stream).lease_end == before
    again = SessionMachine(sessions)
    side.lose_stream()
    side.attach()
    talk(again, side, 6.0)
    assert pool_of(again).lease_end == 6.0 + sessions.directory.lease_s
