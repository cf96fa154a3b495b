"""A worker's metrics, in the format that Prometheus requests first."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from prometheus_client.openmetrics.exposition import generate_latest
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from quire._serving.metrics import keeping_colons
from quire.views import WaitReason
from quire_worker.process.vllm_metrics import VllmCollector
from quire_worker.process.worker_metrics import METRIC_NAMES, WorkerCollector
from quire_worker.requests import queue_times, reception
from quire_worker.scheduling.plan import Work

from tests.worker.engine_harness import prompt, running

DEMO = Path("models/demo").resolve()


async def test_the_metrics_are_valid_openmetrics_under_the_names_that_are_documented() -> None:
    async with running(DEMO, blocks=8) as harness:
        registry = CollectorRegistry()
        registry.register(WorkerCollector(harness.engine))
        page = generate_latest(registry).decode()
    families = list(text_string_to_metric_families(page))  # The parser refuses names that clash.
    assert {f"{family.name}_total" if family.type == "counter" else family.name for family in families} == METRIC_NAMES
    # Only counters end in _total, and the parser strips this ending.
    assert not [family.name for family in families if family.name.endswith("_total")]
    samples = {(sample.name, *sample.labels.values()): sample.value for family in families for sample in family.samples}
    assert samples["quire_worker_blocks",] == 8
    assert samples["quire_worker_samples", "running"] == samples["quire_worker_samples", "waiting"] == 0
    assert samples["quire_worker_allocator_connected",] == 1


async def test_histograms_count_each_request_token_and_pass_and_what_preemption_costs_is_what_was_computed_twice() -> (
    None
):
    async with running(DEMO, blocks=12) as harness:  # Two requests fit: each takes six blocks for 40 + 56 tokens.
        scheduler, numbers = harness.engine.scheduler, harness.engine.telemetry
        advance, passes = scheduler.advance, list[list[Work]]()

        def noted(work: Iterable[Work]) -> None:
            passes.append(list(work))
            advance(passes[-1])

        scheduler.advance = noted  # type: ignore[method-assign]
        prompts = [prompt(40, seed=seed) for seed in range(8)]
        outputs = await asyncio.gather(*(harness.generate(each, max_tokens=56, ignore_eos=True) for each in prompts))
        for output in outputs:
            harness.engine.cancel(output.request)
            harness.engine.cancel(output.request)  # The second call has no effect.
    computed = [(item.sample.age, place) for work in passes for item in work for place in range(item.start, item.end)]
    assert scheduler.roster.preemption_count > 0
    assert scheduler.roster.recomputed_token_count == len(computed) - len(set(computed)) > 0
    assert numbers.inter_token_seconds.buckets()[-1][1] == 8 * 55
    assert numbers.request_seconds.buckets()[-1][1] == 8
    assert numbers.request_seconds.sum >= numbers.first_token_seconds.sum + numbers.inter_token_seconds.sum - 1e-6
    assert numbers.batch_samples.buckets()[-1][1] == len(passes) == numbers.step_seconds.buckets()[-1][1]
    assert numbers.batch_samples.sum == sum(map(len, passes))


async def test_a_sample_has_its_own_time_between_tokens_and_none_before_the_first() -> None:
    async with running(DEMO) as harness:
        output = await harness.generate(prompt(20), max_tokens=5, n=3, temperature=0.5, ignore_eos=True)
        harness.engine.cancel(output.request)
        assert harness.engine.telemetry.inter_token_seconds.buckets()[-1][1] == 3 * 4
        assert harness.engine.telemetry.request_seconds.buckets()[-1][1] == 1


async def test_vllms_names_have_the_numbers_of_the_worker() -> None:
    async with running(DEMO, blocks=12) as harness:
        loop = asyncio.get_running_loop()
        registry = CollectorRegistry()
        beside = VllmCollector(harness.engine, "demo", loop)
        registry.register(WorkerCollector(harness.engine, beside))

        async def scraped() -> dict[tuple[str, ...], float]:
            write, _ = choose_encoder(keeping_colons("application/openmetrics-text;version=1.0.0;q=0.5,*/*;q=0.2"))
            page = (await asyncio.to_thread(write, registry)).decode()
            families = list(text_string_to_metric_families(page))
            return {
                (sample.name, *sample.labels.values()): sample.value
                for family in families
                for sample in family.samples
                if family.name.startswith("vllm:")
            }

        asked = [prompt(40, seed=seed) for seed in range(6)]
        tasks = [asyncio.create_task(harness.generate(each, max_tokens=56, ignore_eos=True)) for each in asked]
        while True:  # Waits until requests wait for blocks: only two requests fit.
            found = await scraped()
            used = found["vllm:kv_cache_usage_perc", "0", "demo"]
            if used and found["vllm:num_requests_waiting_by_reason", "0", "demo", "capacity"] >= 1:
                break
        assert used <= 1
        assert ("vllm:num_requests_waiting_by_reason", "0", "demo", "deferred") in found
        for output in await asyncio.gather(*tasks):
            harness.engine.cancel(output.request)
        while (found := await scraped())["vllm:kv_cache_usage_perc", "0", "demo"]:
            await asyncio.sleep(0)
    assert found["vllm:prefix_cache_queries_total", "0", "demo"] == 6 * 40
    assert found["vllm:generation_tokens_total", "0", "demo"] == 6 * 56
    assert found["vllm:num_preemptions_total", "0", "demo"] == harness.engine.scheduler.roster.preemption_count
    assert found["vllm:time_to_first_token_seconds_count", "0", "demo"] == 6
    assert found["vllm:inter_token_latency_seconds_count", "0", "demo"] == 6 * 55
    assert found["vllm:e2e_request_latency_seconds_count", "0", "demo"] == 6
    assert found["vllm:num_requests_waiting", "0", "demo"] == found["vllm:num_requests_running", "0", "demo"] == 0


async def test_the_queue_time_by_reason_adds_up_to_the_queue_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reception, "LOOK_S", 0.0)  # The reasons are noted in every turn.
    monkeypatch.setattr(queue_times, "SHARE", 0)
    async with running(DEMO, blocks=12) as harness:  # Two requests fit.
        numbers = harness.engine.telemetry
        prompts = [prompt(40, seed=seed) for seed in range(8)]
        await asyncio.gather(*(harness.generate(each, max_tokens=56, ignore_eos=True) for each in prompts))
    assert sum(numbers.queued_s.values()) == pytest.approx(numbers.queue_seconds.sum)
    # The first waiting request waits for blocks, requests behind it wait for their order, and all wait for the
    # allocator.
    reasons = (WaitReason.BLOCKS, WaitReason.ORDER, WaitReason.ALLOCATOR)
    assert all(numbers.queued_s[reason] > 0 for reason in reasons)
    assert numbers.queued_s[WaitReason.NO_SESSION] == numbers.queued_s[WaitReason.PLACES] == 0
    assert min(numbers.queued_s.values()) >= 0


async def test_a_request_that_nobody_looked_at_waited_for_the_next_pass_and_the_allocator(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reception, "LOOK_S", 1e9)
    async with running(DEMO) as harness:
        numbers = harness.engine.telemetry
        await harness.generate(prompt(20), max_tokens=2)
    waited = {reason for reason, seconds in numbers.queued_s.items() if seconds}
    assert waited <= {WaitReason.NEXT_PASS, WaitReason.ALLOCATOR}
    assert sum(numbers.queued_s.values()) == pytest.approx(numbers.queue_seconds.sum)


async def test_hits_save_the_time_of_their_tokens_at_the_measured_rate_and_misses_none() -> None:
    async with running(DEMO) as harness:
        numbers, pace = harness.engine.telemetry, harness.engine.scheduler.roster.pace
        await harness.generate(prompt(200), max_tokens=4)
        assert numbers.saved_prefill_s == 0
        token_s = pace.prefill_seconds_for(1)
        output = await harness.generate(prompt(200), max_tokens=4)
    cached = output.request.usage.cached_token_count
    assert cached > 100
    assert numbers.saved_prefill_s == pytest.approx(cached * token_s)
    assert token_s > 0


async def test_choosing_tokens_is_a_part_of_the_time_of_passes() -> None:
    async with running(DEMO) as harness:
        numbers = harness.engine.telemetry
        await harness.generate(prompt(20), max_tokens=8, temperature=1.0, ignore_eos=True)
    assert 0 < numbers.sampling_s < numbers.forward_s
