"""The engine's text, compared token by token with transformers' own `generate`."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from quire.errors import QuireError, Reason
from quire.protocol.permissions import EVERYTHING
from quire.v1 import worker_pb2 as pb
from quire_worker.execution import layouts, runner
from quire_worker.execution.sizing import PoolMemory
from quire_worker.model.paged_model import PagedModel
from quire_worker.scheduling.output import FinishReason
from quire_worker.scheduling.plan import Plan, Round, Work
from quire_worker.service import WorkerService

from tests.worker.engine_harness import BLOCK_SIZE, prompt, reference_text, running
from tests.worker.tiny_models import write_tiny_llama, write_tiny_qwen3

DEMO = Path("models/demo").resolve()
NAMES = ["demo", "llama", "qwen3"]
LENGTHS = [1, 2, 15, 16, 17, 31, 32, 33, 47, 48, 49, 100, 255, 256, 257, 300]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    tiny = tmp_path_factory.mktemp("models")
    return {
        "demo": DEMO,
        "llama": write_tiny_llama(tiny / "llama"),
        "qwen3": write_tiny_qwen3(tiny / "qwen3"),
    }


@pytest.mark.parametrize("name", NAMES)
async def test_prompts_of_all_lengths_mixed_in_one_batch_give_the_text_of_transformers(
    folders: dict[str, Path], name: str
) -> None:
    folder = folders[name]
    prompts = [prompt(length, seed=length) for length in LENGTHS]
    async with running(folder) as harness:
        tasks = []
        # Requests start one after the other, so that prefills and decodes share passes.
        for tokens in prompts:
            tasks.append(asyncio.create_task(harness.generate(tokens, max_tokens=20)))
            await asyncio.sleep(0)
        outputs = await asyncio.gather(*tasks)
        assert await harness.free_block_count() == 512
    for tokens, output in zip(prompts, outputs, strict=True):
        assert output.tokens[0] == reference_text(folder, tuple(tokens), 20), f"prompt of {len(tokens)}"


@pytest.mark.parametrize("name", NAMES)
async def test_prefix_hits_do_not_change_the_text(folders: dict[str, Path], name: str) -> None:
    folder = folders[name]
    stem = prompt(200, seed=1)
    prompts = [stem[:length] + prompt(tail, seed=tail) for length in (200, 176, 175, 33, 16) for tail in (1, 16, 40)]
    async with running(folder) as harness:
        first = [await harness.generate(tokens, max_tokens=12) for tokens in prompts]
        again = await asyncio.gather(*(harness.generate(tokens, max_tokens=12) for tokens in prompts))
    for tokens, before, after in zip(prompts, first, again, strict=True):
        assert before.tokens[0] == after.tokens[0] == reference_text(folder, tuple(tokens), 12)
        assert after.request.usage.cached_token_count == (len(tokens) - 1) // 16 * 16
    assert sum(output.request.usage.cached_token_count for output in first) > 1500


async def test_a_prompt_that_comes_alone_is_laid_out_before_its_blocks_are_granted(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    sketched, complete = [], layouts.Layouts._of_sketched

    def note(self: layouts.Layouts, parts: Any) -> Any:
        found = complete(self, parts)
        sketched.append(found is not None)
        return found

    monkeypatch.setattr(layouts.Layouts, "_of_sketched", note)
    async with running(folders["llama"]) as harness:
        for tokens, is_sketched in ((prompt(40), True), (prompt(41, seed=1), True), (prompt(40), False)):
            sketched.clear()
            output = await harness.generate(tokens, max_tokens=3)
            assert output.tokens[0] == reference_text(folders["llama"], tuple(tokens), 3)
            assert sketched[0] is is_sketched, "of a prompt that is cached less is computed than was laid out"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("length", [5, 16, 40])
async def test_samples_forked_from_one_prefill_give_the_text_of_transformers(
    folders: dict[str, Path], name: str, length: int
) -> None:
    folder, tokens = folders[name], prompt(length, seed=length)
    async with running(folder) as harness:
        output = await harness.generate(tokens, max_tokens=40, n=4)
        after = await harness.generate(tokens + list(output.tokens[0]), max_tokens=5)
    expected = reference_text(folder, tuple(tokens), 40)
    assert output.tokens == [expected] * 4
    assert after.tokens[0] == reference_text(folder, (*tokens, *expected), 5)
    assert output.request.usage.granted_block_count < output.request.usage.unshared_block_count or length < 16


@pytest.mark.parametrize("name", NAMES)
async def test_eight_requests_in_a_pool_that_fits_two_are_preempted_and_finish_with_the_same_text(
    folders: dict[str, Path], name: str
) -> None:
    folder = folders[name]
    prompts = [prompt(40, seed=i) for i in range(8)]
    async with running(folder, blocks=12) as harness:  # Two requests fit: each takes six blocks for 40 + 56 tokens.
        outputs = await asyncio.gather(
            *(harness.generate(tokens, max_tokens=56, ignore_eos=True) for tokens in prompts)
        )
        preemptions = harness.engine.scheduler.roster.preemption_count
        assert await harness.free_block_count() == 12
    assert preemptions > 0
    for tokens, output in zip(prompts, outputs, strict=True):
        expected = reference_text(folder, tuple(tokens), 56)
        assert output.tokens[0][: len(expected)] == expected
        assert len(output.tokens[0]) == 56


async def test_a_seed_gives_the_same_text_alone_in_company_and_after_a_preemption(folders: dict[str, Path]) -> None:
    sampling = {"max_tokens": 40, "temperature": 0.8, "top_p": 0.95, "top_k": 50, "seed": 11, "ignore_eos": True}
    tokens = prompt(20, seed=3)
    async with running(folders["demo"]) as harness:
        alone = await harness.generate(tokens, n=3, **sampling)
        other_seed = await harness.generate(tokens, n=3, **{**sampling, "seed": 12})
        company = [harness.submit(prompt(30, seed=i), max_tokens=30) for i in range(4)]
        crowded = await harness.generate(tokens, n=3, **sampling)
        for request in company:
            await harness.collect(request)
    async with running(folders["demo"], blocks=8) as harness:  # The samples need ten blocks.
        older = asyncio.gather(*(harness.generate(prompt(40, seed=i), max_tokens=30) for i in range(2)))
        await asyncio.sleep(0)
        preempted = await harness.generate(tokens, n=3, **sampling)
        await older
        assert preempted.request.usage.preemption_count > 0
    assert alone.tokens == crowded.tokens == preempted.tokens
    assert len({*alone.tokens, *other_seed.tokens}) == 6, "samples and seeds must differ"


async def test_the_text_goes_on_when_the_allocator_is_replaced_by_an_empty_one(folders: dict[str, Path]) -> None:
    tokens = prompt(50, seed=9)
    async with running(folders["llama"]) as harness:
        request = harness.submit(tokens, max_tokens=100, ignore_eos=True)
        task = asyncio.create_task(harness.collect(request))
        while request.usage.output_token_count < 10:
            await asyncio.sleep(0)
        await harness.replace_allocator()
        output = await task
        assert await harness.free_block_count() == 512
    assert output.request.usage.granted_block_count == -(-149 // BLOCK_SIZE)  # No block was granted twice.
    expected = reference_text(folders["llama"], tuple(tokens), 100)
    assert output.tokens[0][: len(expected)] == expected
    assert len(output.tokens[0]) == 100


async def test_decoding_finds_its_blocks_granted_and_waits_for_nothing(folders: dict[str, Path]) -> None:
    async with running(folders["llama"]) as harness:
        asked = []
        plan = harness.engine.scheduler.plan

        def count(chosen: Round | None) -> Plan:
            asked.append(plan(chosen))
            return asked[-1]

        harness.engine.scheduler.plan = count  # type: ignore[method-assign]
        output = await harness.generate(prompt(50, seed=9), max_tokens=100, ignore_eos=True)
        assert await harness.free_block_count() == 512
        assert len(output.tokens[0]) == 100
        assert len(asked) == 2, "the prompt, and the blocks given back at the end"


async def test_blocks_are_hashed_and_asked_for_while_the_model_runs(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    began = threading.Event()

    compute = runner.Runner.compute

    def tell_and_compute(self: runner.Runner, *given: Any) -> runner.Computed:
        began.set()
        return compute(self, *given)

    monkeypatch.setattr(runner.Runner, "compute", tell_and_compute)
    async with running(folders["llama"]) as harness:
        plan_ahead, waited = harness.engine.scheduler.plan_ahead, []

        def wait_and_plan(work: list[Work], *, may_wait: bool) -> Plan:
            waited.append(began.wait(60))
            began.clear()
            return plan_ahead(work, may_wait=may_wait)

        harness.engine.scheduler.plan_ahead = wait_and_plan  # type: ignore[assignment, method-assign]
        await harness.generate(prompt(20), max_tokens=3, ignore_eos=True)
    assert len(waited) >= 2
    assert all(waited)


@pytest.mark.parametrize(("ahead_tokens", "others"), [(20, 0), (64, 0), (64, 1)])
async def test_decoding_goes_on_without_an_allocator_for_all_tokens_that_were_granted_ahead(
    folders: dict[str, Path], ahead_tokens: int, others: int
) -> None:
    tokens = prompt(50, seed=9)
    async with running(folders["llama"], ahead_tokens=ahead_tokens, running_max=1) as harness:
        request = harness.submit(tokens, max_tokens=150, ignore_eos=True)
        waiting = [asyncio.create_task(harness.generate(prompt(9), max_tokens=3)) for _ in range(others)]
        task = asyncio.create_task(harness.collect(request))
        while request.usage.output_token_count < 25:
            await asyncio.sleep(0)
        before = request.usage.output_token_count  # read before the stop, because texts continue during it
        await harness.allocator.stop()
        while request.usage.output_token_count < before + ahead_tokens:
            await asyncio.sleep(0)
        assert not harness.engine.session.connected
        assert len(harness.engine.scheduler.roster.waiting) == others
        await harness.allocator.start()
        output = await task
        await asyncio.gather(*waiting)
        assert await harness.free_block_count() == 512
    assert len(output.tokens[0]) == 150
    assert output.request.usage.granted_block_count == -(-199 // BLOCK_SIZE)
    expected = reference_text(folders["llama"], tuple(tokens), 150)
    assert output.tokens[0][: len(expected)] == expected


async def test_text_is_the_tokens_decoded_and_stops_are_left_out(folders: dict[str, Path]) -> None:
    async with running(folders["demo"]) as harness:
        tokenizer = harness.engine.tokenizer
        tokens = tokenizer.encode("The list object")
        output = await harness.generate(tokens, max_tokens=30, ignore_eos=True)
        assert output.texts[0] == tokenizer.decode(list(output.tokens[0]))
        assert output.reasons == [FinishReason.LENGTH]
        stop = output.tokens[0][10]
        stopped = await harness.generate(tokens, max_tokens=30, ignore_eos=True, stop_token_ids=(stop,))
    assert stopped.reasons == [FinishReason.STOP]
    assert stopped.tokens[0] == output.tokens[0][: output.tokens[0].index(stop)]


async def test_a_cancelled_request_frees_its_blocks_at_once(folders: dict[str, Path]) -> None:
    async with running(folders["llama"]) as harness:
        request = harness.submit(prompt(100), max_tokens=400, n=2, ignore_eos=True)
        while request.usage.output_token_count < 4:
            await asyncio.sleep(0)
        harness.engine.cancel(request)
        assert await harness.free_block_count() == 512
        assert request.usage.output_token_count < 400


async def test_a_forward_pass_that_fails_ends_its_requests_alone(folders: dict[str, Path]) -> None:
    async with running(folders["llama"]) as harness:
        broken = harness.submit(prompt(10), max_tokens=5)
        broken.samples[0].tokens[3] = 10**9  # as if by a defect of the engine, an id outside the embedding
        with pytest.raises(QuireError) as caught:
            await harness.collect(broken)
        assert caught.value.reason is Reason.MODEL_FAILED
        healthy = await harness.generate(prompt(10), max_tokens=5)
        assert await harness.free_block_count() == 512
    assert healthy.tokens[0] == reference_text(folders["llama"], tuple(prompt(10)), 5)


@pytest.mark.parametrize("options", [{}, {"temperature": 1.0}, {"logprobs": 2}], ids=str)
async def test_the_logits_of_a_pass_are_freed_when_it_ends_and_not_when_python_looks_for_cycles(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    seen: list[weakref.ref[torch.Tensor]] = []
    alive: list[int] = []
    forward = PagedModel.forward

    def watched(model: PagedModel, *arguments: Any) -> torch.Tensor:
        alive.append(sum(logits() is not None for logits in seen))
        logits = forward(model, *arguments)
        seen.append(weakref.ref(logits))
        return logits

    monkeypatch.setattr(PagedModel, "forward", watched)
    gc.disable()
    try:
        async with running(folders["llama"], ahead_tokens=64) as harness:
            await asyncio.gather(
                *(harness.generate(prompt(20, seed=seed), max_tokens=12, **options) for seed in range(3))
            )
            at_the_end = sum(logits() is not None for logits in seen)
    finally:
        gc.enable()
    assert len(seen) >= 12
    assert not any(alive)
    assert at_the_end <= 1  # A pass after the last token may be launched already, and hold its logits.


async def test_what_a_failed_forward_pass_did_not_write_is_never_published(folders: dict[str, Path]) -> None:
    async with running(folders["llama"]) as harness:
        tokens = prompt(60)
        broken = harness.submit(tokens, max_tokens=5)
        broken.samples[0].tokens[50] = 10**9
        with pytest.raises(QuireError, match="forward pass failed"):
            await harness.collect(broken)
        await harness.free_block_count()
        assert harness.allocator.directory.pool("test").pool.blocks.cached_count == 0
        healthy = await harness.generate(tokens, max_tokens=5)
    assert healthy.request.usage.cached_token_count == 0
    assert healthy.tokens[0] == reference_text(folders["llama"], tuple(tokens), 5)


async def test_a_step_that_the_allocator_refuses_fails_those_it_would_let_in_and_nobody_else(
    folders: dict[str, Path],
) -> None:
    async with running(folders["llama"]) as harness:
        older = harness.submit(prompt(20), max_tokens=60, ignore_eos=True)
        collecting = asyncio.create_task(harness.collect(older))
        while older.usage.output_token_count < 5:
            await asyncio.sleep(0)
        refused = harness.submit(prompt(40, seed=1), max_tokens=5, namespace="n" * 500)
        with pytest.raises(QuireError, match="namespace") as caught:
            await harness.collect(refused)
        assert caught.value.reason is Reason.MALFORMED
        output = await collecting
        assert await harness.free_block_count() == 512
    expected = reference_text(folders["llama"], tuple(prompt(20)), 60)
    assert output.tokens[0][: len(expected)] == expected
    assert len(output.tokens[0]) == 60


async def test_without_an_allocator_new_requests_are_refused_at_once(folders: dict[str, Path]) -> None:
    async with running(folders["llama"]) as harness:
        await harness.allocator.stop()
        while harness.engine.session.connected:
            await asyncio.sleep(0)
        with pytest.raises(QuireError) as caught:
            harness.submit(prompt(5), max_tokens=2)
        assert caught.value.reason is Reason.ALLOCATOR_LOST
        await harness.allocator.start()
        while not harness.engine.session.connected:
            await asyncio.sleep(0)
        assert len((await harness.generate(prompt(5), max_tokens=2, ignore_eos=True)).tokens[0]) == 2


async def test_a_full_queue_refuses_and_names_its_length(folders: dict[str, Path]) -> None:
    async with running(folders["llama"], waiting_max=2) as harness:
        waiting = [harness.submit(prompt(5, seed=i), max_tokens=2) for i in range(2)]
        with pytest.raises(QuireError, match="2 requests") as caught:
            harness.submit(prompt(5), max_tokens=2)
        assert caught.value.reason is Reason.QUEUE_FULL
        for request in waiting:
            await harness.collect(request)


async def test_a_worker_that_shuts_down_takes_no_request_whose_prompt_was_still_being_tokenized(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(folders["llama"]) as harness:
        service = WorkerService(harness.engine, pool="test", model_name="llama", memory=PoolMemory(512, 1 << 20, None))

        def encode(_text: str) -> list[int]:
            service.drain()
            return prompt(5)

        monkeypatch.setattr(harness.engine.tokenizer, "encode", encode)
        request = pb.GenerateRequest(text="x", sampling=pb.SamplingParams(max_tokens=2))
        with pytest.raises(QuireError) as caught:
            async with service._submitted(request, EVERYTHING):
                pass
        assert caught.value.reason is Reason.DRAINING
        harness.engine.stop()
        with pytest.raises(QuireError) as caught:
            harness.submit(prompt(5), max_tokens=2)
        assert caught.value.reason is Reason.DRAINING
