"""Tests the fault table with a streaming worker. The text equals an undisturbed run's, both sides' states agree during
it, and in the end every block is free. README.md lists the test of each fault."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from quire import AsyncAllocator, AsyncClient
from quire.protocol.limits import SILENCE_S

from tests.faults.conftest import WallClock
from tests.faults.scene import LEASE_S, Name, attached, flood, metric, named, pool_of, report
from tests.faults.text_scene import REQUESTS, Streams, Worker, is_ready, worker, worker_process

STEPS = "quire_allocator_steps_total"
AHEAD, BLOCK_SIZE = 64, 16  # a worker's defaults: tokens granted ahead, and tokens of a block
RUNS = int(os.environ.get("QUIRE_FAULT_RUNS", "2"))
KILLS = max(10, RUNS)

pytestmark = [pytest.mark.timeout(200 + 20 * RUNS), pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def name(tmp_path_factory: pytest.TempPathFactory, wall_clock: WallClock) -> AsyncIterator[Name]:
    async with named(tmp_path_factory.mktemp("allocators"), environment=wall_clock.environment) as started:
        yield started


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def text(name: Name, tmp_path_factory: pytest.TempPathFactory, wall_clock: WallClock) -> AsyncIterator[Worker]:
    async with worker(name, tmp_path_factory.mktemp("worker"), wall_clock.environment) as started:
        yield started


async def test_text_goes_on_however_often_the_allocator_is_killed(name: Name, text: Worker) -> None:
    seconds, live, begun = list[float](), 0, time.monotonic()
    while len(seconds) < KILLS:
        await name.ready()
        async with text.streaming() as streams:
            while len(seconds) < KILLS and not streams.are_done:
                await name.ready()
                await streams.more(len(seconds) % 23)
                if streams.are_done:
                    break
                killed = time.monotonic()
                name.replace()
                live += await text.agree() > 0
                seconds.append(time.monotonic() - killed)
                if len(seconds) % 50 == 0:
                    report(f"{time.monotonic() - begun:.0f} s, kill -9, until both states are the same", seconds)
    report(f"kill -9, until both states are the same, {live} times with live sequences", seconds)
    assert live >= KILLS // 5, "some while there was text; a busy machine may miss the moments between two steps"


async def test_text_goes_on_after_an_outage_that_is_longer_than_a_stream_may_be_silent(
    name: Name, text: Worker
) -> None:
    async with text.streaming() as streams:
        await name.ready()
        await streams.more(5)
        name.place.kill()
        await asyncio.wait([asyncio.create_task(asyncio.Event().wait())], timeout=2 * SILENCE_S + 1)
        were_done = streams.are_done
        await name.place.start()  # starts before the assertion, because later tests need the allocator
        assert not were_done, "there is room for 64 tokens of each, and most are longer"
        await text.agree()


async def test_text_goes_on_when_answers_are_lost_with_or_without_their_allocator(name: Name, text: Worker) -> None:
    """If an answer is already in flight when answers start to be lost, no more steps follow it."""
    lost = 0
    for run in range(2 * RUNS):
        async with text.streaming() as streams:
            await name.ready()
            await streams.more(run)
            before, until = await metric(name.place, STEPS), time.monotonic() + SILENCE_S
            name.proxy.swallow_replies()
            while not (is_lost := await metric(name.place, STEPS) > before) and time.monotonic() < until:
                pass
            lost += is_lost
            if run % 2:
                name.replace()
            name.proxy.cut()
            name.proxy.let_through()
            await text.agree()
    assert lost, "a step was applied, and nobody was told"


async def test_text_goes_on_when_connections_are_cut(name: Name, text: Worker) -> None:
    async with text.streaming() as streams:
        for run in range(10 * RUNS):
            name.proxy.cut()
            await streams.more(run % 7)
            await text.agree()


async def test_text_goes_on_when_a_connection_is_half_open(name: Name, text: Worker) -> None:
    async with text.streaming() as streams:
        name.proxy.strand()
        await streams.more(30)
    name.proxy.let_through()
    await text.idle()


async def test_text_goes_on_when_the_worker_wanders_between_allocators(name: Name, text: Worker) -> None:
    async with text.streaming() as streams:
        for _ in range(3 * RUNS):
            await name.turn()
            await text.agree()
            await streams.more(10)


async def test_text_goes_on_when_reports_are_cut_in_the_middle(name: Name, text: Worker) -> None:
    """The cut comes after the first chunk's namespaces, which follow the sequences. The owner builds cut parts
    again."""
    for run in range(2 * RUNS):
        await name.ready()
        async with text.streaming(namespace="cut") as streams:
            before = (await text.client.status()).report_count
            name.proxy.cut_after(5 * run, text="cut")
            await name.turn()
            await text.agree()
            assert (await text.client.status()).report_count >= before + 2
            await streams.more(5)


async def test_text_goes_on_when_the_allocator_stands_still_for_longer_than_its_lease(name: Name, text: Worker) -> None:
    before = (await text.client.status()).report_count
    async with text.streaming():
        name.place.send(signal.SIGSTOP)
        await asyncio.wait([asyncio.create_task(asyncio.Event().wait())], timeout=LEASE_S + 1)
        name.place.send(signal.SIGCONT)
    assert (await text.client.status()).report_count == before, "the session was resumed"


async def test_decoding_goes_on_with_what_was_granted_ahead_while_the_allocator_stands_still(
    name: Name, text: Worker
) -> None:
    """Decoding also continues while a later request waits. A block of the tokens ahead may be requested and not granted
    yet."""
    (prompt, sampling), (late_prompt, late_sampling) = REQUESTS[0], REQUESTS[2]
    prompt_token_count = (await text.client.generate(prompt, max_tokens=1)).usage.prompt_token_count
    await text.idle()
    before = (await text.client.status()).output_token_count
    async with text.client.stream(prompt, ignore_eos=True, timeout_s=300, **sampling) as chunks:
        output = [(await anext(chunks)).text for _ in range(20)]
        ahead = 0
        # On a busy machine, the worker may decode tokens before the next blocks are granted.
        while ahead < AHEAD - BLOCK_SIZE:
            (granted,) = [each.token_count for each in (await pool_of(name.place, "default")).sequences]
            ahead = granted - prompt_token_count - ((await text.client.status()).output_token_count - before)
        name.place.send(signal.SIGSTOP)
        try:
            late = asyncio.create_task(text.client.generate(late_prompt, ignore_eos=True, **late_sampling))
            assert await text.generates(before + granted - prompt_token_count)
            assert not late.done()
        finally:
            name.place.send(signal.SIGCONT)
        output += [chunk.text async for chunk in chunks]
    assert "".join(output) == text.undisturbed[0][0]
    assert (await late).text == text.undisturbed[2][0]
    await text.idle()


async def test_text_goes_on_when_the_wall_clock_jumps_by_an_hour(
    name: Name, text: Worker, wall_clock: WallClock
) -> None:
    wall_clock.require()
    before = (await text.client.status()).report_count
    for seconds in (3_600, -3_600, 0):
        async with text.streaming() as streams:
            wall_clock.jump(seconds)
            await streams.more(60)
            await text.agree()
    assert (await text.client.status()).report_count == before
    assert name.proxy.target == name.place.address


async def test_text_goes_on_beside_a_pool_that_floods_and_callers_that_say_nothing(name: Name, text: Worker) -> None:
    async with (
        attached(name, pool="flood", kinds="full") as flooder,
        AsyncAllocator(name.place.address) as client,
    ):
        silent = [client._stub.Session() for _ in range(30)]
        flooding = asyncio.create_task(flood(flooder))
        async with text.streaming():
            pass
        assert not flooding.done()
        flooding.cancel()
        await asyncio.wait([flooding])
        for call in silent:
            call.cancel()


async def test_samples_share_their_half_filled_block_whenever_the_allocator_dies(name: Name, text: Worker) -> None:
    prompt, sampling = REQUESTS[1]
    for run in range(2 * RUNS):
        await name.ready()
        task = asyncio.create_task(text.client.generate(prompt, ignore_eos=True, **sampling))
        while not (await text.client.status()).running_count and not task.done():
            pass
        for _ in range(run % 4):
            await text.client.status()
        name.replace()
        assert [sample.text for sample in (await task).samples] == text.undisturbed[1]
    await text.idle()


async def test_tenants_do_not_see_each_others_prefixes_nor_their_computation(name: Name, text: Worker) -> None:
    prompt, sampling = REQUESTS[2]
    first = await text.client.generate(prompt, namespace="one", ignore_eos=True, **sampling)
    again = await text.client.generate(prompt, namespace="one", ignore_eos=True, **sampling)
    assert again.usage.cached_token_count > 100
    others = await asyncio.gather(
        *(text.client.generate(prompt, namespace=space, ignore_eos=True, **sampling) for space in ("two", "three"))
    )
    assert [other.usage.cached_token_count for other in others] == [0, 0]
    assert {first.text, again.text, *(other.text for other in others)} == {text.undisturbed[2][0]}
    assert name.place.server.process.poll() is None


async def test_a_worker_that_was_silent_for_longer_than_its_lease_displaces_nobody_and_goes_on(
    name: Name, text: Worker, tmp_path: Path
) -> None:
    second = worker_process(tmp_path / "second", name.proxy.address)
    try:
        async with text.streaming() as streams:
            text.process.process.send_signal(signal.SIGSTOP)
            await is_ready(second)  # The second worker waited for the lease to end and has an empty pool.
            async with AsyncClient(second.address) as other:
                text.process.process.send_signal(signal.SIGCONT)
                await streams.more(3)
                assert await Streams(other).texts() == text.undisturbed, "in spite of the older owner"
                assert not streams.are_done, "nobody grants it blocks"
            second.stop()
    finally:
        text.process.process.send_signal(signal.SIGCONT)
        second.stop()
