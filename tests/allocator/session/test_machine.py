"""The owner's and the allocator's state machines without a wire: sequences of events that a gRPC stream cannot easily
produce.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from quire.protocol.limits import REPORT_CHUNK_ENTRIES_MAX
from quire.protocol.outcomes import Result
from quire.protocol.state_digest import STATE_DIGEST_STEPS
from quire.protocol.steps import StepBuilder
from quire.session.owner import Answer, Phase, PoolOwner
from quire.v1 import _packed_pb2 as packed
from quire.v1 import allocator_pb2 as pb
from quire_allocator import limits
from quire_allocator.core.ownership.directory import Directory
from quire_allocator.core.refusal import Refusal
from quire_allocator.session.machine import SessionMachine
from quire_allocator.session.registry import SessionRegistry

from tests.simulation.histories import pool_spec
from tests.simulation.world import Quiet

SPEC = pool_spec("full", 32)


@pytest.fixture
def sessions() -> SessionRegistry:
    ids: Iterator[int] = itertools.count(1)
    directory = Directory(lease_s=10.0, pools_max=8)
    return SessionRegistry(directory, Quiet(), new_session_id=lambda: next(ids).to_bytes(16, "big"))


def owner(name: str = "pool", window: int = 1) -> PoolOwner:
    return PoolOwner(name, SPEC, incarnation=name.encode().ljust(16), window=window)


def run(machine: SessionMachine, side: PoolOwner, now: float = 0.0) -> list[Answer]:
    """Passes messages until both machines are quiet; returns the answers."""
    answers = []
    while side.outbox:
        for reply in machine.receive(side.outbox.popleft(), now):
            answer = side.receive(reply)
            if answer is not None:
                answers.append(answer)
    return answers


def attached(sessions: SessionRegistry, side: PoolOwner, now: float = 0.0) -> SessionMachine:
    machine = SessionMachine(sessions)
    side.attach()
    run(machine, side, now)
    assert side.phase is Phase.OPEN
    return machine


def allocate(sequence_id: int, token_count: int = 5) -> StepBuilder:
    step = StepBuilder()
    step.allocate(sequence_id, token_count)
    return step


def test_steps_submitted_before_the_stream_is_up_go_out_when_it_is(sessions: SessionRegistry) -> None:
    side = owner(window=3)
    for number in (1, 2, 3):
        assert side.submit(allocate(number)) == number
    assert not side.has_room
    machine = SessionMachine(sessions)
    side.attach()
    assert [answer.number for answer in run(machine, side)] == [1, 2, 3]
    assert side.has_room


def test_every_64th_answer_carries_a_digest_and_one_that_differs_leads_to_a_report(sessions: SessionRegistry) -> None:
    side = owner()
    machine = attached(sessions, side)
    for number in range(1, STATE_DIGEST_STEPS):
        side.submit(allocate(number, 1) if number < 4 else StepBuilder())
        run(machine, side)
    pool = sessions.directory.pool("pool").pool
    pool.sequences[2].committed_token_count = 1  # only a defect causes a difference
    side.submit(StepBuilder())
    (answer,) = run(machine, side)
    assert answer.number == STATE_DIGEST_STEPS
    assert (side.phase, side.session_id, side.disagreement_count) == (Phase.IDLE, b"", 1)
    machine = attached(sessions, side)
    assert side.report_count == 2
    assert sessions.directory.pool("pool").pool.sequences[2].committed_token_count == 0


def test_of_a_large_pool_each_digest_covers_a_part_and_what_differs_is_found_in_a_while(
    sessions: SessionRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("quire_allocator.session.steps", "quire.session.ledger"):
        monkeypatch.setattr(f"{module}.STATE_DIGEST_ENTRIES_MAX", 300)  # one digest covers two of nine sequences
    side = owner()
    machine = attached(sessions, side)
    for number in range(1, 10):
        side.submit(allocate(number, 8))
        run(machine, side)
    while side.last_step < 20 * STATE_DIGEST_STEPS:
        side.submit(StepBuilder())
        run(machine, side)
    assert (side.phase, side.disagreement_count) == (Phase.OPEN, 0)
    sessions.directory.pool("pool").pool.sequences[5].committed_token_count = 1  # only a defect causes a difference
    while side.phase is Phase.OPEN and side.last_step < 40 * STATE_DIGEST_STEPS:
        side.submit(StepBuilder())
        run(machine, side)
    assert side.disagreement_count == 1


def test_a_step_that_trips_an_invariant_stops_the_pool_and_the_third_time_for_ten_minutes(
    sessions: SessionRegistry,
) -> None:
    side = owner()
    machine = attached(sessions, side)
    sessions.check_invariants = True
    for time in range(limits.QUARANTINES_MAX):
        side.submit(allocate(1))
        assert machine.owner is not None
        machine.owner.pool.blocks.cached_count += 1  # plants a defect: a wrong count
        with pytest.raises(Refusal) as caught:
            machine.receive(side.outbox.popleft(), float(time))
        assert caught.value.reason == "POOL_QUARANTINED"
        side.lose_stream()
        side.give_up_steps()
        if time < limits.QUARANTINES_MAX - 1:
            machine = attached(sessions, side, float(time))
            assert side.report_count == 2 + time
    side.attach()
    with pytest.raises(Refusal, match="cannot be attached for now") as refused:
        SessionMachine(sessions).receive(side.outbox.popleft(), 3.0)
    assert refused.value.retry_after_s == limits.QUARANTINE_WINDOW_S - 3.0
    assert (sessions.refused_pool_count(3.0), sessions.refused_pool_count(limits.QUARANTINE_WINDOW_S)) == (1, 0)
    machine = attached(sessions, side, 3.0 + limits.QUARANTINE_WINDOW_S)
    side.submit(allocate(1))
    assert run(machine, side)[0].outcome.grows[0].result is Result.OK


def test_only_so_many_reports_are_staged_at_a_time_and_empty_ones_do_not_count(sessions: SessionRegistry) -> None:
    chunk = pb.ReportChunk(namespaces=[""], sequences=[pb.ReportedSequence(sequence_id=1, tables=[pb.BlockTable()])])
    staging = []
    for number in range(limits.REPORTS_MAX):
        side, machine = owner(f"staging {number}".replace(" ", "-")), SessionMachine(sessions)
        side.attach()
        machine.receive(side.outbox.popleft(), 0.0)
        machine.receive(packed.SessionRequest(report_chunk=chunk), 0.0)
        staging.append(machine)
    attached(sessions, owner("empty"))
    late = owner("late")
    machine = SessionMachine(sessions)
    late.attach()
    machine.receive(late.outbox.popleft(), 0.0)
    with pytest.raises(Refusal) as caught:
        machine.receive(packed.SessionRequest(report_chunk=chunk), 0.0)
    assert caught.value.reason == "REPORT_ADMISSION"
    machine.close()
    staging[0].close()
    machine = SessionMachine(sessions)
    late.attach()
    machine.receive(late.outbox.popleft(), 0.0)
    assert machine.receive(packed.SessionRequest(report_chunk=chunk), 0.0) == []


def test_one_caller_leaves_half_of_the_reports_at_a_time_to_others(sessions: SessionRegistry) -> None:
    def claim(name: str, caller: str) -> None:
        side, machine = owner(name), SessionMachine(sessions, caller=caller)
        side.last_step = 7
        side.attach()
        machine.receive(side.outbox.popleft(), 0.0)

    for number in range(limits.REPORTS_MAX // 2):
        claim(f"own-{number}", "a")
    with pytest.raises(Refusal) as caught:
        claim("own-last", "a")
    assert caught.value.reason == "REPORT_ADMISSION"
    claim("other", "b")


def test_who_has_applied_steps_waits_before_it_puts_its_report_together(sessions: SessionRegistry) -> None:
    for number in range(limits.REPORTS_MAX):
        side, machine = owner(f"staging-{number}"), SessionMachine(sessions)
        side.last_step = 7
        side.attach()
        machine.receive(side.outbox.popleft(), 0.0)
    late, machine = owner("late"), SessionMachine(sessions)
    late.last_step = 7
    late.attach()
    with pytest.raises(Refusal) as caught:
        machine.receive(late.outbox.popleft(), 0.0)
    assert (caught.value.reason, late.report_count) == ("REPORT_ADMISSION", 0)
    attached(sessions, owner("new"))


WRONG_CHUNKS: list[tuple[pb.ReportChunk, str]] = [
    (pb.ReportChunk(number=1, freed_blocks=bytes(4)), "MALFORMED"),
    (pb.ReportChunk(), "MALFORMED"),
    (pb.ReportChunk(freed_blocks=bytes(3)), "MALFORMED"),
    (pb.ReportChunk(freed_blocks=bytes(4)), "MALFORMED"),
    (pb.ReportChunk(freed_blocks=bytes(4 * REPORT_CHUNK_ENTRIES_MAX + 4)), "TOO_LARGE"),
    (pb.ReportChunk(namespaces=["x" * 300_000], freed_blocks=bytes(4)), "TOO_LARGE"),
    (pb.ReportChunk(namespaces=["x" * 129], freed_blocks=bytes(4)), "MALFORMED"),
    (pb.ReportChunk(sequences=[pb.ReportedSequence(sequence_id=1)]), "MALFORMED"),
    (pb.ReportChunk(sequences=[pb.ReportedSequence(sequence_id=1, tables=[pb.BlockTable()])]), "MALFORMED"),
    (
        pb.ReportChunk(
            namespaces=[""], sequences=[pb.ReportedSequence(sequence_id=1, priority=11, tables=[pb.BlockTable()])]
        ),
        "MALFORMED",
    ),
    (pb.ReportChunk(prefixes=[pb.ReportedPrefix(blocks=bytes(4), digests=bytes(31))], namespaces=[""]), "MALFORMED"),
]


@pytest.mark.parametrize(("chunk", "reason"), WRONG_CHUNKS, ids=range(len(WRONG_CHUNKS)))
def test_a_wrong_chunk_is_refused_and_the_pool_that_was_there_stays(
    sessions: SessionRegistry, chunk: pb.ReportChunk, reason: str
) -> None:
    side = owner()
    machine = attached(sessions, side)
    side.submit(allocate(1))
    run(machine, side)
    before = sessions.directory.pool("pool").pool
    side.disown()
    side.attach()
    machine = SessionMachine(sessions)
    machine.receive(side.outbox.popleft(), 0.0)
    with pytest.raises(Refusal) as caught:
        machine.receive(packed.SessionRequest(report_chunk=chunk), 0.0)
    assert caught.value.reason == reason
    machine.close()
    assert sessions.directory.pool("pool").pool is before
    assert not sessions.staging
    attached(sessions, side)


def test_a_sequence_that_goes_on_in_another_chunk_with_other_counts_is_refused(sessions: SessionRegistry) -> None:
    side, machine = owner(), SessionMachine(sessions)
    side.attach()
    machine.receive(side.outbox.popleft(), 0.0)
    for number, tokens in enumerate((8, 9)):
        part = pb.ReportedSequence(sequence_id=1, token_count=tokens, tables=[pb.BlockTable(blocks=bytes(4))])
        chunk = pb.ReportChunk(number=number, namespaces=[""], sequences=[part])
        if number:
            with pytest.raises(Refusal, match="have different counts"):
                machine.receive(packed.SessionRequest(report_chunk=chunk), 0.0)
        else:
            machine.receive(packed.SessionRequest(report_chunk=chunk), 0.0)
