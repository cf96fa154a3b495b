"""Tests permissions inside a session: namespaces that enter a stream, and a reader's view."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
from quire.errors import QuireError, Reason
from quire.protocol.outcomes import Result
from quire.protocol.permissions import EVERYTHING, Permissions, permissions_of
from quire.protocol.steps import StepBuilder
from quire.session.owner import Phase, PoolOwner, Verdict
from quire.v1 import allocator_pb2 as pb
from quire_allocator.core.ownership.directory import Directory
from quire_allocator.core.refusal import Refusal
from quire_allocator.session.machine import SessionMachine
from quire_allocator.session.registry import SessionRegistry
from quire_allocator.session.steps import pool_digest

from tests.allocator.service.harness import RunningAllocator, UnaryOwner, d, refused, running_allocator
from tests.allocator.session.test_machine import run
from tests.simulation.histories import pool_spec
from tests.simulation.world import Quiet

RED = permissions_of(["quire://pool/*", "quire://namespace/red"])
BLUE = permissions_of(["quire://pool/*", "quire://namespace/blue"])
BOTH = permissions_of(["quire://pool/*", "quire://namespace/red", "quire://namespace/blue"])


@pytest.fixture
def sessions() -> SessionRegistry:
    ids: Iterator[int] = itertools.count(1)
    directory = Directory(lease_s=10.0, pools_max=8)
    return SessionRegistry(
        directory, Quiet(), new_session_id=lambda: next(ids).to_bytes(16, "big"), check_invariants=True
    )


def owner(kind: str = "full") -> PoolOwner:
    return PoolOwner("pool", pool_spec(kind, 32), incarnation=b"owner".ljust(16), window=1)


def attach(sessions: SessionRegistry, side: PoolOwner, permissions: Permissions) -> SessionMachine:
    machine = SessionMachine(sessions, permissions=permissions)
    side.attach()
    run(machine, side)
    assert side.phase is Phase.OPEN
    return machine


def ask(machine: SessionMachine, side: PoolOwner, step: StepBuilder) -> None:
    side.submit(step)
    run(machine, side)


def grown(machine: SessionMachine, side: PoolOwner, step: StepBuilder) -> list[Result]:
    """Sends a step; returns the results of its grows."""
    side.submit(step)
    (reply,) = machine.receive(side.outbox.popleft(), 0.0)
    answer = side.receive(reply)
    assert answer is not None
    return [each.result for each in answer.outcome.grows]


def allocating(sequence_id: int, namespace: str, token_count: int = 4) -> StepBuilder:
    step = StepBuilder()
    step.allocate(sequence_id, token_count, namespace=namespace)
    return step


def live(sessions: SessionRegistry) -> dict[int, str]:
    """Returns the namespaces of the pool's sequences."""
    sequences = sessions.directory.pool("pool").pool.sequences
    return {number: sequence.namespace.name for number, sequence in sequences.items()}


@pytest.mark.parametrize("permissions", [Permissions(), permissions_of(["quire://observe/*", "quire://namespace/*"])])
def test_a_pool_that_one_may_not_own_cannot_be_attached(sessions: SessionRegistry, permissions: Permissions) -> None:
    side, machine = owner(), SessionMachine(sessions, permissions=permissions)
    side.attach()
    with pytest.raises(Refusal) as caught:
        machine.receive(side.outbox.popleft(), 0.0)
    assert caught.value.reason == "POOL_FORBIDDEN"
    assert sessions.directory.open_pools() == []


def test_an_attach_that_is_not_permitted_fences_nobody(sessions: SessionRegistry) -> None:
    side = owner()
    machine = attach(sessions, side, EVERYTHING)
    ask(machine, side, allocating(1, "red"))
    side.lose_stream()
    side.attach()
    intruder = SessionMachine(sessions, permissions=permissions_of(["quire://pool/other", "quire://namespace/*"]))
    with pytest.raises(Refusal, match="does not permit owning"):
        intruder.receive(side.outbox.popleft(), 0.0)
    assert machine.ending is None
    assert live(sessions) == {1: "red"}


def test_only_the_sequence_in_another_namespace_is_refused(sessions: SessionRegistry) -> None:
    side = owner()
    machine = attach(sessions, side, RED)
    ask(machine, side, allocating(1, "red"))
    step = allocating(2, "red")
    step.allocate(3, 4, namespace="blue")
    step.allocate(4, 4)
    step.allocate(5, 4, namespace="red")
    step.free(1)
    assert grown(machine, side, step) == [Result.OK, Result.FORBIDDEN, Result.FORBIDDEN, Result.OK]
    assert live(sessions) == {2: "red", 5: "red"}
    assert side.ledger.digest() == pool_digest(sessions.directory.pool("pool").pool)


def test_a_refused_sequence_may_be_asked_for_in_its_own_namespace(sessions: SessionRegistry) -> None:
    side = owner()
    machine = attach(sessions, side, RED)
    assert grown(machine, side, allocating(1, "")) == [Result.FORBIDDEN]
    assert grown(machine, side, allocating(1, "red")) == [Result.OK]
    step = StepBuilder()
    step.grow(1, 8)  # A grow names no namespace, so it needs no permission.
    assert grown(machine, side, step) == [Result.OK]
    assert live(sessions) == {1: "red"}


def test_a_child_grows_in_the_namespace_of_its_parent_in_the_very_step_of_its_fork(sessions: SessionRegistry) -> None:
    side = owner()
    machine = attach(sessions, side, RED)
    ask(machine, side, allocating(1, "red"))
    step = StepBuilder()
    step.fork(1, 2)
    step.fork(2, 3)
    step.grow(2, 8)
    step.grow(3, 8)
    ask(machine, side, step)
    assert live(sessions) == {1: "red", 2: "red", 3: "red"}


def fork_of_a_missing_parent(step: StepBuilder) -> None:
    step.fork(9, 2)


def fork_of_a_parent_that_is_freed(step: StepBuilder) -> None:
    step.free(1)
    step.fork(1, 2)


def fork_below_another(step: StepBuilder) -> None:
    step.fork(1, 3)
    step.fork(1, 2)


@pytest.mark.parametrize("permissions", [RED, EVERYTHING])
@pytest.mark.parametrize("fork", [fork_of_a_missing_parent, fork_of_a_parent_that_is_freed, fork_below_another])
def test_a_grow_of_what_could_not_be_forked_makes_no_sequence(
    sessions: SessionRegistry, fork: Any, permissions: Permissions
) -> None:
    side = owner()
    machine = attach(sessions, side, permissions)
    ask(machine, side, allocating(1, "red"))
    step = StepBuilder()
    fork(step)
    # Judged by its sequence id alone, this grow would create a sequence in the unnamed namespace.
    step.grow(2, 4)
    assert grown(machine, side, step) == [Result.NOT_FOUND]
    assert 2 not in live(sessions)


@pytest.mark.parametrize("permissions", [RED, EVERYTHING])
def test_nor_does_one_of_the_child_of_a_state_that_is_not_committed(
    sessions: SessionRegistry, permissions: Permissions
) -> None:
    side = owner("state")
    machine = attach(sessions, side, permissions)
    ask(machine, side, allocating(1, "red"))
    step = StepBuilder()
    step.fork(1, 2)
    step.grow(2, 4)
    assert grown(machine, side, step) == [Result.NOT_FOUND]
    assert live(sessions) == {1: "red"}


def test_a_session_with_sequences_of_another_namespace_is_neither_resumed_nor_reported(
    sessions: SessionRegistry,
) -> None:
    side = owner()
    machine = attach(sessions, side, BOTH)
    ask(machine, side, allocating(1, "red"))
    side.lose_stream()
    side.attach()
    with pytest.raises(Refusal, match="this namespace"):
        SessionMachine(sessions, permissions=BLUE).receive(side.outbox.popleft(), 0.0)
    assert machine.ending is None
    side.lose_stream()
    sessions.directory.remove(sessions.directory.pool("pool"))
    side.attach()
    with pytest.raises(Refusal, match="this namespace"):
        run(SessionMachine(sessions, permissions=BLUE), side)
    assert sessions.directory.open_pools() == []


def test_an_owner_takes_a_refused_report_for_final_and_keeps_what_it_knows() -> None:
    for reason in (Reason.POOL_FORBIDDEN, Reason.NAMESPACE_FORBIDDEN):
        side = owner()
        side.attach()
        for phase, verdict in (
            (Phase.ATTACHING, Verdict.FINAL),
            (Phase.REPORTING, Verdict.FINAL),
            (Phase.OPEN, Verdict.STEP_REFUSED),
        ):
            side.phase = phase
            assert side.judge(QuireError.of(reason, "")) is verdict


# -- views of readers --------------------------------------------------------------------------------------------------


async def a_red_and_a_blue_prefix(allocator: RunningAllocator, pool: str) -> None:
    """Makes a sequence of two committed blocks in each of two namespaces."""
    opened = await UnaryOwner.open(allocator, pool, block_count=32)
    for number, namespace in ((1, "red"), (2, "blue")):
        digests = d(namespace[:2])
        await opened.allocate(sequence_id=number, token_count=9, namespace=namespace, digests=digests)
        await opened.commit(sequence_id=number, token_count=8, digests=digests)


async def test_a_reader_is_shown_its_own_namespaces_and_pools_only() -> None:
    async with running_allocator() as allocator:
        await a_red_and_a_blue_prefix(allocator, "seen")
        await a_red_and_a_blue_prefix(allocator, "hidden")
        allocator.service.authorize = lambda _context: permissions_of(["quire://observe/seen", "quire://namespace/red"])
        stub = allocator.stub
        assert [pool.pool for pool in (await stub.ListPools(pb.ListPoolsRequest())).pools] == ["seen"]
        request = pb.MatchPrefixRequest(namespace="red", digests=d("re"))
        assert [match.pool for match in (await stub.MatchPrefix(request)).matches] == ["seen"]
        blocks = await stub.GetPoolBlocks(pb.GetPoolBlocksRequest(pool="seen"))
        assert [sequence.namespace for sequence in blocks.sequences] == ["red"]
        assert blocks.summary.sequence_count == 2
        usage = (await stub.GetPoolUsage(pb.GetPoolUsageRequest(pool="seen"))).usage
        assert [space.namespace for space in usage.namespaces] == ["red"]
        assert usage.namespace_count == 1
        assert {prefix.namespace for prefix in usage.longest_prefixes} == {"red"}


async def test_a_watcher_is_told_of_its_own_namespaces_only() -> None:
    async with running_allocator() as allocator:
        await a_red_and_a_blue_prefix(allocator, "a")
        allocator.service.authorize = lambda _context: RED
        watch = allocator.stub.WatchEvents(pb.WatchEventsRequest(pool="a"))
        assert (await watch.read()).HasField("cleared")
        assert (await watch.read()).stored.namespace == "red"
        assert (await watch.read()).HasField("snapshot_end")
        allocator.service.authorize = lambda _context: EVERYTHING
        session = allocator.service.directory.pool("a").session_id
        same = UnaryOwner(allocator, session)
        same.next_step = allocator.service.directory.pool("a").steps.next_step
        for number, namespace in ((3, "blue"), (4, "red")):
            await same.allocate(number, 5, namespace=namespace)
            await same.commit(number, 4, d("x"))
        event = await watch.read()
        assert (event.stored.namespace, event.cursor) == ("red", 4)
        watch.cancel()


# -- unary sessions ----------------------------------------------------------------------------------------------------


async def test_a_unary_step_makes_no_sequence_in_another_namespace_and_drops_nothing_of_it() -> None:
    async with running_allocator() as allocator:
        allocator.service.authorize = lambda _context: RED
        owner = await UnaryOwner.open(allocator)
        step = StepBuilder().allocate(1, 4, namespace="red").allocate(2, 4, namespace="blue")
        assert [grown.result for grown in (await owner.step(step)).grows] == [Result.OK, Result.FORBIDDEN]
        for drop in (StepBuilder().drop("blue"), StepBuilder().drop()):
            with refused(Reason.NAMESPACE_FORBIDDEN):
                await owner.step(drop)
        assert (await owner.free(1)).ok


async def test_who_opened_a_unary_session_may_not_use_the_sequences_that_another_caller_made_in_it() -> None:
    async with running_allocator() as allocator:
        allocator.service.authorize = lambda _context: RED
        owner = await UnaryOwner.open(allocator)
        allocator.service.authorize = lambda _context: BOTH
        await owner.allocate(1, 4, namespace="blue")
        allocator.service.authorize = lambda _context: RED
        for call in (lambda: owner.fork(1, 2), lambda: owner.free(1), lambda: owner.commit(1, 4, d("a"))):
            with refused(Reason.NAMESPACE_FORBIDDEN):
                await call()


async def test_a_caller_goes_on_with_a_unary_session_only_if_it_may_use_the_namespaces_of_its_sequences() -> None:
    async with running_allocator() as allocator:
        await a_red_and_a_blue_prefix(allocator, "a")
        pool = allocator.service.directory.pool("a")
        owner = UnaryOwner(allocator, pool.session_id)
        owner.next_step = pool.steps.next_step
        allocator.service.authorize = lambda _context: RED
        for call in (owner.renew, lambda: owner.free(1)):
            with refused(Reason.NAMESPACE_FORBIDDEN):
                await call()
        allocator.service.authorize = lambda _context: BOTH
        assert (await owner.free(2)).ok
        allocator.service.authorize = lambda _context: RED
        assert (await owner.free(1)).ok
