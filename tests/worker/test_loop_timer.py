"""A timer fires at its earliest time, but after a stall only when the loop has read its messages."""

from __future__ import annotations

import asyncio
import time

from quire_worker.calls.loop_timer import LATE_S, LoopTimer


async def test_it_rings_once_at_the_earliest_of_its_times() -> None:
    rung = asyncio.Queue[float]()
    timer = LoopTimer(lambda: rung.put_nowait(time.monotonic()), time.monotonic)
    begun_s = time.monotonic()
    for later_s in (30.0, 0.05, 0.1):
        timer.set(begun_s + later_s)
    assert begun_s + 0.05 <= await asyncio.wait_for(rung.get(), 20) < begun_s + 20
    # The timer has rung, so the test sets the timer again, as a real callback does.
    timer.set(begun_s + 0.2)
    assert await asyncio.wait_for(rung.get(), 20) >= begun_s + 0.2
    timer.set(begun_s)
    await asyncio.wait_for(rung.get(), 20)


async def test_a_loop_that_stood_still_reads_before_it_rings() -> None:
    events = list[str]()
    rung = asyncio.Event()

    def ring() -> None:
        events.append("rung")
        rung.set()

    timer = LoopTimer(ring, time.monotonic)

    async def message() -> None:
        # Like a real call, the message takes several turns of the loop before the worker handles it.
        for _ in range(20):
            await asyncio.sleep(0)
        events.append("read")

    begun_s = time.monotonic()
    timer.set(begun_s + 0.05)
    task = asyncio.create_task(message())
    while time.monotonic() < begun_s + 0.1 + 2 * LATE_S:
        pass
    await asyncio.wait_for(rung.wait(), 20)
    await task
    assert events == ["read", "rung"]
