"""Tests the session protocol's fault table on real allocators: nothing leaks, nothing is lost, every page reads back.

The owner is a session without a model, so that a fault can come between any two messages. `test_text.py` tests the same
faults with a streaming worker. README.md lists the test of each fault.

`QUIRE_FAULT_RUNS` is the number of repetitions of each fault (`make faults RUNS=1000`). The tests print recovery times.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest
import pytest_asyncio
from quire import AsyncAllocator, PoolSpec
from quire.errors import QuireError, Reason
from quire.events import IndexCleared, SnapshotEnd
from quire.protocol.steps import StepBuilder
from quire.session import AsyncSession

from tests.faults.conftest import WallClock
from tests.faults.scene import LEASE_S, Name, attached, metric, named, report

RUNS = int(os.environ.get("QUIRE_FAULT_RUNS", "2"))
KILLS = max(5, RUNS)  # kills of each kind of pool; together with `test_text.py`, a full test run has at least 20
STEPS = "quire_allocator_steps_total"
EXPIRATIONS = "quire_allocator_lease_expirations_total"
SILENT_S = 5.0  # seconds, more than a stream may be silent

pytestmark = [pytest.mark.timeout(120 + 20 * RUNS), pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def name(tmp_path_factory: pytest.TempPathFactory, wall_clock: WallClock) -> AsyncIterator[Name]:
    async with named(tmp_path_factory.mktemp("allocators"), environment=wall_clock.environment) as started:
        yield started


@pytest.mark.parametrize("kinds", ["full", "everything"])
async def test_an_allocator_killed_in_mid_step_is_replaced_and_live_sequences_go_on(name: Name, kinds: str) -> None:
    seconds = []
    async with attached(name, kinds=kinds) as owner:
        for run in range(KILLS):
            for _ in range(10):
                await owner.step()
            await name.ready()
            step = owner.history.make()
            answer = await owner.session.submit(step)
            # So the kill comes at different times: before or after the step is applied and answered.
            for _ in range(run % 5):
                await asyncio.sleep(0)
            started = time.monotonic()
            name.replace()
            await owner.act(step, answer)
            seconds.append(time.monotonic() - started)
            await owner.step()
            await owner.check(name.place)
    report(f"kill -9, {kinds}, until the first answer of an empty allocator", seconds)


@pytest.mark.parametrize("kinds", ["full", "everything"])
async def test_answers_that_are_lost_after_their_step_was_applied_are_given_again(name: Name, kinds: str) -> None:
    copies = evictions = 0.0
    async with attached(name, kinds=kinds) as owner:
        for run in range(400 * RUNS):
            if run >= 4 * RUNS and copies and evictions:
                break
            for _ in range(6):
                copies += len((await owner.step()).copies)
            is_lost = run % 4 == 3
            if is_lost:
                await name.ready()
            step, before = owner.history.make(), await metric(name.place, STEPS)
            evicted = await metric(name.place, "quire_allocator_evictions_total")
            name.proxy.swallow_replies()
            answer = await owner.session.submit(step)
            while await metric(name.place, STEPS) == before:
                pass
            assert not answer.done()
            evictions += await metric(name.place, "quire_allocator_evictions_total") - evicted
            if is_lost:
                name.replace()
            name.proxy.cut()
            name.proxy.let_through()
            copies += len((await owner.act(step, answer)).copies)
            await owner.check(name.place)
    assert copies
    assert evictions, "decided by the step whose answer was lost"


async def test_connections_that_are_cut_at_any_moment_cost_nothing_but_time(name: Name) -> None:
    seconds = []
    async with attached(name) as owner:
        for run in range(5 * RUNS):
            await owner.step()
            step = owner.history.make()
            answer = await owner.session.submit(step)
            for _ in range(run % 9):
                await asyncio.sleep(0)
            name.proxy.cut()
            started = time.monotonic()
            await owner.act(step, answer)
            seconds.append(time.monotonic() - started)
        await owner.check(name.place)
    report("connection cut, until the answer", seconds)


async def test_half_open_connections_are_left_and_what_they_still_bring_changes_nothing(name: Name) -> None:
    async with attached(name) as owner:
        await owner.step()
        step = owner.history.make()
        name.proxy.strand()
        answer = await owner.session.submit(step)
        started = time.monotonic()
        await owner.act(step, answer)  # The owner sends the step over a new connection.
        report("half-open connection, until the answer", [time.monotonic() - started])
        await owner.step()
        name.proxy.let_through()  # The old, fenced stream delivers the same step again.
        for _ in range(10):
            await owner.step()
        await owner.check(name.place)


async def test_an_allocator_that_stands_still_for_longer_than_its_leases_keeps_every_pool(name: Name) -> None:
    async with attached(name) as owner:
        await owner.step()
        step = owner.history.make()
        expired = await metric(name.place, EXPIRATIONS)
        name.place.send(signal.SIGSTOP)
        answer = await owner.session.submit(step)
        done, _ = await asyncio.wait([answer], timeout=SILENT_S)
        assert not done
        assert not owner.session.connected
        name.place.send(signal.SIGCONT)
        await owner.act(step, answer)
        await owner.step()
        await owner.check(name.place)
        assert owner.session.report_count == 1, "nothing but the first one: the session was resumed"
        assert await metric(name.place, EXPIRATIONS) == expired


@pytest.mark.parametrize("is_stranded", [False, True], ids=["stands still", "half open"])
async def test_sessions_and_calls_of_one_client_leave_a_silent_connection_each_for_itself(
    name: Name, is_stranded: bool
) -> None:
    spec, step = PoolSpec.full_attention(block_count=64, block_size=4), StepBuilder()
    step.allocate(1, 20)
    address = name.proxy.address if is_stranded else name.place.address
    async with AsyncAllocator(address) as client:
        sessions = [client.session(f"one-client-{i}", spec) for i in range(2)]
        for session in sessions:
            await session.open()
        events = client.watch_events("one-client-0")
        watching = asyncio.create_task(anext(events))
        assert isinstance(await watching, IndexCleared)
        if is_stranded:
            name.proxy.strand()
        else:
            name.place.send(signal.SIGSTOP)
        leaving = [asyncio.create_task(is_left(session)) for session in sessions]
        done, _ = await asyncio.wait(leaving, timeout=SILENT_S)
        assert len(done) == 2
        name.place.send(signal.SIGCONT)
        for session in sessions:
            assert (await asyncio.wait_for(session.step(step), SILENT_S)).free_block_count == 59
        if not is_stranded:  # Unary calls would stay on the stranded connection.
            assert {"one-client-0", "one-client-1"} <= {pool.pool for pool in await client.list_pools()}
            assert isinstance(await asyncio.wait_for(anext(events), SILENT_S), SnapshotEnd)
        for session in sessions:
            await session.close()
    name.proxy.let_through()


async def is_left(session: AsyncSession) -> None:
    """Returns once the session's stream is down."""
    while session.connected:
        await asyncio.sleep(0)


async def test_an_owner_that_wanders_between_two_allocators_never_resumes_an_older_state(name: Name) -> None:
    async with attached(name) as owner:
        for turn in range(2 * RUNS):
            for _ in range(4):
                await owner.step()
            await name.turn()
            await owner.step()
            await owner.check(name.place)
            assert owner.session.report_count == turn + 2


async def test_a_report_that_is_cut_in_the_middle_is_as_if_it_had_never_begun(name: Name) -> None:
    async with attached(name, kinds="full") as owner:
        for _ in range(60):
            await owner.step()
        for byte_count in range(100, 100 + 200 * 6 * RUNS, 200):
            name.proxy.cut_after(byte_count % 4_000)
            await name.turn()
            await owner.step()
            await owner.check(name.place)
        name.proxy.cut_after(1 << 30)
        assert owner.session.report_count > 1 + 6 * RUNS, "some reports were sent twice"


async def test_many_owners_come_back_at_once(name: Name) -> None:
    count, seconds = 12, []
    told: list[QuireError] = []
    async with AsyncExitStack() as stack:
        several = [attached(name, pool=f"pool-{i}", kinds="full", seed=i) for i in range(count)]
        owners = [await stack.enter_async_context(each) for each in several]
        for owner in owners:
            owner.session._on_wait = told.append

        async def recover() -> float:
            started = time.monotonic()
            await asyncio.gather(*(each.step() for each in owners))
            return time.monotonic() - started

        def were_kept_waiting() -> bool:
            return any(error.reason is Reason.REPORT_ADMISSION for error in told)

        while len(seconds) < RUNS or (len(seconds) < RUNS + 20 and not were_kept_waiting()):
            for _ in range(5):
                await recover()
            await name.ready()
            name.replace()
            seconds.append(await recover())
            for each in owners:
                await each.check(name.place)
    assert were_kept_waiting(), "few reports are taken in at a time"
    report(f"kill -9 under {count} pools, until the last one has its answer", seconds)


async def test_a_second_process_waits_for_the_pool_and_disturbs_nobody(name: Name) -> None:
    async with attached(name, kinds="full") as first:
        await first.step()
        waited = asyncio.Queue[QuireError]()
        async with attached(name, kinds="full", on_wait=waited.put_nowait, opens=False) as second:
            opening = asyncio.create_task(second.session.open())
            for _ in range(5):
                assert (await waited.get()).reason is Reason.POOL_OWNED
                await first.step()
            await first.check(name.place)
            await first.session.close()
            await opening
            await second.step()
            await second.check(name.place)


async def test_an_owner_that_was_silent_for_longer_than_its_lease_displaces_nobody(name: Name) -> None:
    async with attached(name, kinds="full") as zombie:
        for _ in range(10):
            await zombie.step()
        name.proxy.swallow()
        step = zombie.history.make()
        answer = await zombie.session.submit(step)
        direct = name.place.address
        # The second session opens once the zombie's lease has ended.
        async with attached(name, kinds="full", seed=2, address=direct) as living:
            await living.step()
            name.proxy.cut()
            name.proxy.let_through()
            for _ in range(20):
                await living.step()
                await living.check(name.place)
            assert not answer.done()
        await zombie.act(step, answer)  # The zombie has reported its pages and owns the pool again.
        await zombie.step()
        await zombie.check(name.place)


async def test_a_wall_clock_that_jumps_by_an_hour_is_not_looked_at(name: Name, wall_clock: WallClock) -> None:
    wall_clock.require()
    async with attached(name) as owner:
        expired = await metric(name.place, EXPIRATIONS)
        for seconds in (3_600, -3_600, 0):
            wall_clock.jump(seconds)
            until = time.monotonic() + LEASE_S / 2  # The allocator checks leases in this half of a lease.
            while time.monotonic() < until:
                await owner.step()
            await owner.check(name.place)
        assert owner.session.report_count == 1
        assert await metric(name.place, EXPIRATIONS) == expired
