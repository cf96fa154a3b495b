"""When an alarm rings: at the earliest time, and not before a loop that stood still has read what came meanwhile."""

from __future__ import annotations

import asyncio
import time

from quire_worker.alarm import LATE_S, Alarm


async def test_it_rings_once_at_the_earliest_of_its_times() -> None:
    rung = list[float]()
    alarm = Alarm(lambda: rung.append(time.monotonic()), time.monotonic)
    begun_s = time.monotonic()
    for later_s in (30.0, 0.05, 0.2):
        alarm.set(begun_s + later_s)
    await asyncio.sleep(0.4)
    assert len(rung) == 1
    assert rung[0] >= begun_s + 0.05
    alarm.set(begun_s - 1.0)
    await asyncio.sleep(0.01)
    assert len(rung) == 2, "it is set anew by who hears it, also to what has passed"


async def test_a_loop_that_stood_still_reads_before_it_rings() -> None:
    events = list[str]()
    alarm = Alarm(lambda: events.append("rung"), time.monotonic)

    async def message() -> None:
        for _ in range(20):  # as a call goes through the loop several times before it is heard
            await asyncio.sleep(0)
        events.append("read")

    alarm.set(time.monotonic() + 0.05)
    task = asyncio.create_task(message())
    time.sleep(0.1 + 2 * LATE_S)
    await task
    await asyncio.sleep(3 * LATE_S)
    assert events == ["read", "rung"]
