"""The fault table of the session protocol with real processes: nothing leaks, nothing is lost, every page reads back.

`QUIRE_FAULT_RUNS` says how often each fault is repeated (`make faults RUNS=1000`); recovery times are printed.
"""

from __future__ import annotations

import asyncio
import os
import signal
import statistics
import time
from pathlib import Path

import pytest

from tests.faults.scene import Place, scene

RUNS = int(os.environ.get("QUIRE_FAULT_RUNS", "3"))
SILENT_S = 5.0  # more than a stream may be

pytestmark = pytest.mark.timeout(120 + 20 * RUNS)


def report(what: str, seconds: list[float]) -> None:
    print(f"{what}: {len(seconds)} runs, median {statistics.median(seconds):.2f} s, worst {max(seconds):.2f} s")


@pytest.mark.parametrize("kinds", ["full", "everything"])
async def test_an_allocator_killed_in_mid_step_is_replaced_and_live_sequences_go_on(tmp_path: Path, kinds: str) -> None:
    seconds = []
    async with scene(tmp_path, kinds=kinds) as (owner, place, _):
        for run in range(RUNS):
            for _ in range(10):
                await owner.step()
            step = owner.history.make()
            answer = await owner.session.submit(step)
            for _ in range(run % 5):  # applied or not, answered or not
                await asyncio.sleep(0)
            place.kill()
            started = time.monotonic()
            await place.start()
            await owner.act(step, answer)
            seconds.append(time.monotonic() - started)
            await owner.step()
            await owner.check(place)
    report(f"kill -9, {kinds}, until the first answer, start of the process included", seconds)


async def test_connections_that_are_cut_at_any_moment_cost_nothing_but_time(tmp_path: Path) -> None:
    seconds = []
    async with scene(tmp_path) as (owner, place, proxy):
        for run in range(5 * RUNS):
            await owner.step()
            step = owner.history.make()
            answer = await owner.session.submit(step)
            for _ in range(run % 9):
                await asyncio.sleep(0)
            proxy.cut()
            started = time.monotonic()
            await owner.act(step, answer)
            seconds.append(time.monotonic() - started)
        await owner.check(place)
    report("connection cut, until the answer", seconds)


async def test_a_black_hole_is_left_and_the_session_resumed_behind_it(tmp_path: Path) -> None:
    async with scene(tmp_path) as (owner, place, proxy):
        await owner.step()
        step = owner.history.make()
        proxy.swallow()
        answer = await owner.session.submit(step)
        done, _ = await asyncio.wait([answer], timeout=SILENT_S)
        assert not done
        assert not owner.session.connected
        proxy.cut()
        proxy.let_through()
        await owner.act(step, answer)
        await owner.check(place)


async def test_an_allocator_that_stands_still_keeps_every_pool(tmp_path: Path) -> None:
    async with scene(tmp_path) as (owner, place, _):
        await owner.step()
        step = owner.history.make()
        place.send(signal.SIGSTOP)
        answer = await owner.session.submit(step)
        done, _ = await asyncio.wait([answer], timeout=SILENT_S)
        assert not done
        place.send(signal.SIGCONT)
        await owner.act(step, answer)
        await owner.step()
        await owner.check(place)


async def test_an_owner_that_wanders_between_two_allocators_never_resumes_an_older_state(tmp_path: Path) -> None:
    async with scene(tmp_path) as (owner, place, proxy):
        other = Place(tmp_path / "other")
        await other.start()
        try:
            for run in range(2 * RUNS):
                for _ in range(4):
                    await owner.step()
                here = other if run % 2 == 0 else place
                proxy.target = here.address
                proxy.cut()
                await owner.step()
                await owner.check(here)
        finally:
            other.server.stop()
