"""Refusal of requests at submission, and requests that end while they wait, with a real model."""

from __future__ import annotations

import asyncio
import itertools
import re
from pathlib import Path

import pytest
from quire.errors import DeadlineExceededError, QuireError, Reason
from quire_worker.requests import reception
from quire_worker.scheduling.pace import PASSES, Pace

from tests.worker.engine_harness import prompt, running
from tests.worker.tiny_models import write_tiny_llama


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("models") / "llama")


async def test_who_cannot_be_done_in_time_is_refused_at_the_door_and_others_are_not(folder: Path) -> None:
    async with running(folder) as harness:
        # Lets the engine measure how long a pass takes.
        await harness.generate(prompt(20), max_tokens=20, ignore_eos=True)
        pass_s = harness.engine.scheduler.roster.pace.pass_s
        assert pass_s > 0
        sampling = {"max_tokens": 1000, "ignore_eos": True}
        with pytest.raises(DeadlineExceededError) as caught:
            harness.submit(prompt(5), time_left_s=500 * pass_s, **sampling)
        assert caught.value.reason is Reason.DEADLINE
        assert not harness.engine.scheduler.roster.has_work
        # Without `ignore_eos`, this request may end with its first token, so the worker does not refuse it.
        kept = harness.submit(prompt(5), time_left_s=500 * pass_s, max_tokens=1000)
        harness.engine.cancel(kept)


async def test_who_waits_too_long_is_told_so_and_never_computed(folder: Path) -> None:
    # Each reading of the clock adds a millisecond, so all passes seem to take equally long.
    looks = itertools.count()
    async with running(folder, blocks=12, clock=lambda: next(looks) / 1000) as harness:
        first = harness.submit(prompt(40), max_tokens=120, ignore_eos=True)
        while first.usage.output_token_count < 10:
            await asyncio.sleep(0)
        pass_s = harness.engine.scheduler.roster.pace.pass_s
        # The late request needs all 12 blocks, so it waits until the first request ends. Then it needs 20 passes, one
        # per token.
        late = harness.submit(prompt(170, seed=1), time_left_s=21 * pass_s, max_tokens=20, ignore_eos=True)
        with pytest.raises(DeadlineExceededError) as caught:
            await harness.collect(late)
        assert caught.value.reason is Reason.DEADLINE
        said = re.search(r"before its deadline, ([\d.]+) s after its arrival: raise its timeout", caught.value.message)
        assert said is not None
        assert float(said[1]) == pytest.approx(21 * pass_s, abs=0.001)
        assert late.usage.output_token_count == 0
        assert not late.admitted
        output = await harness.collect(first)
        assert len(output.tokens[0]) == 120


async def test_a_full_queue_says_when_to_come_back_by_how_long_others_have_waited(folder: Path) -> None:
    async with running(folder, waiting_max=2, running_max=1) as harness:
        telemetry = harness.engine.telemetry
        assert telemetry.retry_after_s is None, "nobody has waited yet"
        telemetry.queue_seconds.observe(6.0)
        telemetry.queue_seconds.observe(10.0)
        waiting = [harness.submit(prompt(5, seed=i), max_tokens=2) for i in range(2)]
        with pytest.raises(QuireError) as caught:
            harness.submit(prompt(5), max_tokens=2)
        assert (caught.value.reason, caught.value.retry_after_s) == (Reason.QUEUE_FULL, 4.0)
        for request in waiting:
            await harness.collect(request)
        assert int(telemetry.queue_seconds.buckets()[-1][1]) == 4


async def test_a_namespace_that_waits_leaves_room_in_the_queue_for_another(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(folder, waiting_max=4, running_max=1) as harness:
        requests = [harness.submit(prompt(5, seed=i), namespace="a", max_tokens=2) for i in range(4)]
        with pytest.raises(QuireError, match="4 requests of this namespace") as caught:
            harness.submit(prompt(5), namespace="a", max_tokens=2)
        assert caught.value.reason is Reason.QUEUE_FULL
        requests += [harness.submit(prompt(5, seed=i), namespace="b", max_tokens=2) for i in range(2)]
        with pytest.raises(QuireError, match="2 requests of this namespace"):
            harness.submit(prompt(5), namespace="b", max_tokens=2)
        for request in requests:
            await harness.collect(request)
        requests = [harness.submit(prompt(5, seed=9), namespace="c", max_tokens=2)]
        monkeypatch.setattr(reception, "QUEUED_TOKENS_MAX", 30)
        with pytest.raises(QuireError, match="requests of this namespace with 5 tokens"):
            harness.submit(prompt(5), namespace="c", max_tokens=2, allowed_token_ids=tuple(range(60)))
        for request in requests:
            await harness.collect(request)


async def test_a_namespace_of_which_nobody_runs_gets_a_place_of_one_that_has_several(folder: Path) -> None:
    async with running(folder, running_max=3) as harness:
        held = [harness.submit(prompt(20, seed=i), namespace="a", max_tokens=300, ignore_eos=True) for i in range(6)]
        while sum(request.admitted for request in held) < 3:
            await asyncio.sleep(0)
        mine = [harness.submit(prompt(20, seed=9 + i), namespace="b", max_tokens=10, ignore_eos=True) for i in range(2)]
        for request in mine:
            await harness.collect(request)
        assert not any(request.is_done for request in held)
        assert sum(request.usage.preemption_count for request in held) == 1
        for request in held:
            output = await harness.collect(request)
            assert len(output.tokens[0]) == 300


async def test_a_namespace_of_which_nobody_runs_gets_blocks_of_one_that_has_several(folder: Path) -> None:
    async with running(folder, blocks=16) as harness:
        held = [harness.submit(prompt(40, seed=i), namespace="a", max_tokens=80, ignore_eos=True) for i in range(4)]
        while not held[0].admitted or held[0].usage.output_token_count < 40:
            await asyncio.sleep(0)
        mine = harness.submit(prompt(60, seed=9), namespace="b", max_tokens=2, ignore_eos=True)
        await harness.collect(mine)
        assert not all(request.is_done for request in held)
        for request in held:
            output = await harness.collect(request)
            assert len(output.tokens[0]) == 80


async def test_a_higher_priority_gets_its_first_token_first(folder: Path) -> None:
    async with running(folder, running_max=1) as harness:
        before = harness.submit(prompt(20), max_tokens=30, ignore_eos=True)
        while not before.admitted:
            await asyncio.sleep(0)
        low = harness.submit(prompt(20, seed=1), max_tokens=3, priority=-1)
        high = harness.submit(prompt(20, seed=2), max_tokens=3, priority=1)
        for request in (before, low, high):
            await harness.collect(request)
        assert low.first_token_s is not None
        assert high.first_token_s is not None
        assert high.first_token_s < low.first_token_s


def test_a_pace_is_that_of_the_shortest_pass_and_of_the_largest_prompt() -> None:
    pace = Pace()
    assert pace.pass_s == 0
    assert pace.seconds_for(100) is None
    pace.observe(0, 0.001)  # This pass computed no tokens.
    pace.observe(1, 0.01)
    pace.observe(64, 0.04)
    assert pace.pass_s == 0.01
    assert pace.seconds_for(640) == pytest.approx(0.4)


def test_the_rate_of_prompts_is_of_the_latest_passes_that_mostly_computed_prompts() -> None:
    pace = Pace()
    pace.observe(8, 0.08, sample_count=8)  # This pass decoded 8 samples.
    assert pace.prefill_seconds_for(100) == 0
    pace.observe(64, 0.04)
    pace.observe(36, 0.01, sample_count=3)
    assert pace.prefill_seconds_for(1_000) == pytest.approx(0.5)
    for _ in range(PASSES):
        pace.observe(10, 0.01)
    assert pace.prefill_seconds_for(1_000) == pytest.approx(1.0)
