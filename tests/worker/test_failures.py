"""A request that cannot be computed fails alone: the others of its batch get exactly transformers' text."""

from __future__ import annotations

import asyncio
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from quire.errors import QuireError, Reason
from quire.protocol.outcomes import StepOutcome, read_reply
from quire.protocol.permissions import permissions_of
from quire.session import owner
from quire.v1 import _packed_pb2 as packed
from quire.v1 import allocator_pb2 as pb
from quire_worker.attention import CpuPagedAttention
from quire_worker.execution.failures import FailureKind, failure_of, is_out_of_memory
from quire_worker.execution.parts import Computed
from quire_worker.sampling import sampler
from quire_worker.scheduling.request import Request

from tests.worker.broken_models import break_decoder, poison, single_character_token
from tests.worker.engine_harness import Harness, paged_model, reference_text, running
from tests.worker.launching import launch_passes
from tests.worker.tiny_models import write_tiny_qwen3

POISON = 5
BLOCKS = 512
Layers = Sequence[torch.Tensor]


def prompt(length: int, *, seed: int = 0, without: Sequence[int] = (POISON,)) -> list[int]:
    dice = random.Random(seed)
    return [dice.choice([token for token in range(1, 320) if token not in without]) for _ in range(length)]


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_qwen3(tmp_path_factory.mktemp("healthy") / "qwen3")


@pytest.fixture(scope="module")
def poisoned(healthy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("poisoned") / "qwen3"
    shutil.copytree(healthy, folder)
    poison(folder, POISON)
    return folder


@pytest.fixture(params=["a kernel looks at logits", "torch does", "passes are launched"])
def looks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs a test with each way of finding the finite and the largest logits."""
    if request.param == "torch does":
        monkeypatch.setattr(CpuPagedAttention, "look", lambda *_: None)
    if request.param == "passes are launched":
        launch_passes(monkeypatch)


class Company:
    """Requests that are computed while another one fails, and their expected texts."""

    def __init__(self, harness: Harness, folder: Path, count: int = 3, *, length: int = 30) -> None:
        self.folder = folder
        self.prompts = [prompt(length + i, seed=100 + i) for i in range(count)]
        self.requests = [harness.submit(tokens, max_tokens=40, ignore_eos=True) for tokens in self.prompts]
        self._outputs = asyncio.gather(*map(harness.collect, self.requests))

    async def decoding(self) -> None:
        """Returns when all of the requests have tokens."""
        while not all(request.usage.output_token_count > 2 for request in self.requests):
            await asyncio.sleep(0)

    async def check(self) -> None:
        outputs = await self._outputs
        for tokens, output in zip(self.prompts, outputs, strict=True):
            expected = reference_text(self.folder, tuple(tokens), 40)
            assert len(output.tokens[0]) == 40
            assert output.tokens[0][: len(expected)] == expected


async def fails(harness: Harness, request: Request, reason: Reason) -> None:
    with pytest.raises(QuireError) as caught:
        await harness.collect(request)
    assert caught.value.reason is reason


@contextmanager
def forward_fails(folder: Path, error: type[Exception], when: Callable[[list[int]], bool]) -> Iterator[None]:
    """Makes the folder's model raise for passes whose tokens satisfy `when`, which may also count calls."""

    def before(_module: torch.nn.Module, _arguments: Any, options: Any) -> None:
        if when(options["input_ids"].flatten().tolist()):
            raise error("planted")

    hook = paged_model(folder).module.register_forward_pre_hook(before, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()


# -- not permitted -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("number", "reason"), [(8, Reason.NAMESPACE_FORBIDDEN), (99, Reason.VERSION)])
async def test_a_result_that_stays_ends_only_who_asks_for_it(
    healthy: Path, number: int, reason: Reason, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answered(step: packed.Step, reply: packed.StepReply, group_count: int) -> StepOutcome:
        told = [number if result == pb.RESULT_FORBIDDEN else result for result in reply.grow_results]
        reply.ClearField("grow_results")
        reply.MergeFrom(packed.StepReply(grow_results=told))  # type: ignore[arg-type]
        return read_reply(step, reply, group_count)

    monkeypatch.setattr(owner, "read_reply", answered)
    async with running(healthy, permissions=permissions_of(["quire://pool/*", "quire://namespace/"])) as harness:
        ups_and_downs: list[bool] = []
        harness.engine.session.on_change = ups_and_downs.append
        company = Company(harness, healthy)
        await company.decoding()
        for seed in range(5):
            bad = [harness.submit(prompt(20, seed=seed), namespace="other", n=2, max_tokens=5) for _ in range(2)]
            # This request shares the allocator's step with the bad requests.
            good = harness.submit(prompt(25, seed=seed), max_tokens=20, ignore_eos=True)
            for request in bad:
                await fails(harness, request, reason)
            assert (await harness.collect(good)).tokens[0] == reference_text(healthy, tuple(good.prompt), 20)
        await company.check()
        assert ups_and_downs == []
        assert await harness.free_block_count() == BLOCKS


# -- logits that are not numbers ---------------------------------------------------------------------------------------


@pytest.mark.usefixtures("looks")
async def test_a_prompt_that_gives_nan_ends_alone_and_frees_its_blocks(poisoned: Path) -> None:
    async with running(poisoned) as harness:
        company = Company(harness, poisoned)
        await company.decoding()
        bad = harness.submit([*prompt(20), POISON, *prompt(5, seed=1)], max_tokens=5)
        good = harness.submit(prompt(25, seed=2), max_tokens=40, ignore_eos=True)  # shares a pass with `bad`
        await fails(harness, bad, Reason.MODEL_FAILED)
        assert not company.requests[0].is_done
        await company.check()
        assert (await harness.collect(good)).tokens[0][:20] == reference_text(poisoned, tuple(good.prompt), 20)
        assert await harness.free_block_count() == BLOCKS
        assert harness.engine.telemetry.failures == {FailureKind.NOT_FINITE: 1}


@pytest.mark.usefixtures("looks")
async def test_a_token_that_gives_nan_in_the_middle_of_a_text_ends_it_there(healthy: Path, tmp_path: Path) -> None:
    folder = tmp_path / "qwen3"
    shutil.copytree(healthy, folder)
    victim = prompt(20, seed=3)
    text = reference_text(healthy, tuple(victim), 30)
    place = next(i for i in range(8, 30) if text[i] not in (*text[:i], *victim))
    poison(folder, text[place])
    async with running(folder) as harness:
        company = Company(harness, healthy)
        request = harness.submit(victim, max_tokens=30, ignore_eos=True, n=2)
        seen: list[int] = []
        while not isinstance(delivery := await request.output.deliveries.get(), QuireError):
            seen += delivery.token_ids if delivery.sample == 0 else ()
        assert delivery.reason is Reason.MODEL_FAILED
        assert tuple(seen) == text[: place + 1]
        await company.check()
        assert await harness.free_block_count() == BLOCKS


@pytest.mark.usefixtures("looks")
async def test_nothing_is_published_of_a_prompt_that_gave_nan_in_an_early_chunk(poisoned: Path) -> None:
    async with running(poisoned, batch_tokens=64) as harness:
        tokens = [*prompt(10), POISON, *prompt(200, seed=1)]
        for _ in range(2):
            request = harness.submit(tokens, max_tokens=5)
            await fails(harness, request, Reason.MODEL_FAILED)
            assert request.usage.cached_token_count == 0
        assert await harness.free_block_count() == BLOCKS
        assert harness.allocator.directory.pool("test").pool.blocks.cached_count == 0


async def test_pages_full_of_nan_do_no_harm_to_whoever_gets_them_next(poisoned: Path) -> None:
    async with running(poisoned, blocks=8) as harness:  # With so few blocks, every page is reused.
        for turn in range(4):
            bad = harness.submit([POISON, *prompt(100, seed=turn)], max_tokens=5, namespace=str(turn))
            await fails(harness, bad, Reason.MODEL_FAILED)
            pages = harness.engine.cache.layers[1].pages
            assert pages.isnan().flatten(1).any(1).sum() >= 4, "those of its first chunk"
            company = Company(harness, poisoned, 2, length=20)
            await company.check()
        assert await harness.free_block_count() == 8


# -- out of memory -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens_max", [1, 3, 20])
async def test_a_batch_that_is_too_large_for_the_memory_is_computed_in_parts(healthy: Path, tokens_max: int) -> None:
    sampling = {"max_tokens": 20, "temperature": 0.9, "seed": 4, "ignore_eos": True, "n": 3}
    async with running(healthy) as harness:
        undisturbed = await harness.generate(prompt(50, seed=9), **sampling)
    with forward_fails(healthy, torch.OutOfMemoryError, lambda tokens: len(tokens) > tokens_max):
        async with running(healthy) as harness:
            company = Company(harness, healthy)
            sampled = await harness.generate(prompt(50, seed=9), **sampling)
            await company.check()
            assert await harness.free_block_count() == BLOCKS
            assert harness.engine.telemetry.retry_count > 3
            assert not harness.engine.telemetry.failures
    assert sampled.tokens == undisturbed.tokens


async def test_a_request_that_has_no_memory_even_by_itself_ends_alone(healthy: Path) -> None:
    with forward_fails(healthy, torch.OutOfMemoryError, lambda tokens: POISON in tokens):
        async with running(healthy) as harness:
            company = Company(harness, healthy)
            await company.decoding()
            bad = harness.submit([*prompt(30), POISON, *prompt(30)], max_tokens=5)
            await fails(harness, bad, Reason.OUT_OF_MEMORY)
            await company.check()
            assert await harness.free_block_count() == BLOCKS
            assert harness.engine.telemetry.failures == {FailureKind.OUT_OF_MEMORY: 1}


async def test_copies_without_memory_are_made_one_by_one(healthy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sampling = {"max_tokens": 20, "temperature": 0.9, "seed": 4, "ignore_eos": True, "n": 4}
    async with running(healthy) as harness:
        undisturbed = await harness.generate(prompt(40), **sampling)
        attention, counts = harness.engine.model.attention, list[int]()
        copy_blocks = attention.copy_blocks

        def one_at_a_time(layers: Layers, sources: Sequence[int], destinations: Sequence[int]) -> None:
            counts.append(len(sources))
            if len(sources) > 1:
                raise torch.OutOfMemoryError
            copy_blocks(layers, sources, destinations)

        monkeypatch.setattr(attention, "copy_blocks", one_at_a_time)
        assert (await harness.generate(prompt(40), **sampling)).tokens == undisturbed.tokens
        assert max(counts) > 1
        assert await harness.free_block_count() == BLOCKS


async def test_who_holds_a_block_that_could_not_be_copied_ends_alone(
    healthy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(healthy) as harness:
        company = Company(harness, healthy)
        await company.decoding()
        attention = harness.engine.model.attention
        copy_blocks = attention.copy_blocks

        def without_memory(layers: Layers, sources: Sequence[int], destinations: Sequence[int]) -> None:
            if sources:
                raise torch.OutOfMemoryError
            copy_blocks(layers, sources, destinations)

        monkeypatch.setattr(attention, "copy_blocks", without_memory)
        await fails(harness, harness.submit(prompt(40), max_tokens=20, n=4), Reason.OUT_OF_MEMORY)
        await company.check()
        assert await harness.free_block_count() == BLOCKS


async def test_a_lost_block_is_looked_for_among_all_that_run(healthy: Path) -> None:
    async with running(healthy) as harness:
        company = Company(harness, healthy)
        await company.decoding()
        victim = company.requests[0].samples[0]
        failure = failure_of(torch.OutOfMemoryError())
        computed = Computed([], [], [], [], [], {}, {victim.tables[0][-1]: failure}, 0, 0.0)
        harness.engine._end_failed(computed)
        assert [request.is_done for request in company.requests] == [True, False, False]
        with pytest.raises(QuireError):
            await company.check()
        assert await harness.free_block_count() == BLOCKS


@pytest.mark.parametrize("further", [{}, {"frequency_penalty": 1.0, "logprobs": 2}])
async def test_sampling_without_memory_is_done_in_halves_and_draws_the_same_numbers(
    healthy: Path, monkeypatch: pytest.MonkeyPatch, further: dict[str, Any]
) -> None:
    sampling = {"max_tokens": 20, "temperature": 0.9, "seed": 4, "ignore_eos": True, "n": 5, **further}
    async with running(healthy) as harness:
        undisturbed = await harness.generate(prompt(40), **sampling)
        topmost = sampler.sample

        def two_rows_at_most(logits: torch.Tensor, *rest: Any) -> torch.Tensor:
            if len(logits) > 2:
                raise torch.OutOfMemoryError
            return topmost(logits, *rest)

        monkeypatch.setattr(sampler, "sample", two_rows_at_most)
        assert (await harness.generate(prompt(40), **sampling)).tokens == undisturbed.tokens
        assert harness.engine.telemetry.retry_count > 10


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (MemoryError(), True),
        (RuntimeError("std::bad_alloc"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("shape mismatch"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_what_counts_as_out_of_memory(error: Exception, expected: bool) -> None:
    assert is_out_of_memory(error) is expected


def test_an_allocation_that_fails_for_real_counts_as_out_of_memory() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60, dtype=torch.uint8)  # 1 EiB
    assert is_out_of_memory(caught.value)


# -- other errors ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 3])
async def test_requests_that_the_model_raises_at_are_found_out_in_a_batch(healthy: Path, count: int) -> None:
    with forward_fails(healthy, ValueError, lambda tokens: POISON in tokens):
        async with running(healthy, batch_tokens=256) as harness:
            company = Company(harness, healthy, 5)
            await company.decoding()
            bad = [harness.submit([*prompt(9, seed=i), POISON], max_tokens=5) for i in range(count)]
            for request in bad:
                await fails(harness, request, Reason.MODEL_FAILED)
            await company.check()
            assert await harness.free_block_count() == BLOCKS
            assert harness.engine.telemetry.failures == {FailureKind.EXCEPTION: count}


async def test_a_pass_that_fails_only_once_harms_nobody(healthy: Path) -> None:
    turns = iter([False] * 5 + [True] + [False] * 1000)
    with forward_fails(healthy, RuntimeError, lambda _: next(turns)):
        async with running(healthy) as harness:
            company = Company(harness, healthy)
            await company.check()
            assert harness.engine.telemetry.retry_count == 1
            assert not harness.engine.telemetry.failures


# -- the tokenizer -----------------------------------------------------------------------------------------------------


async def test_a_tokenizer_that_panics_at_a_token_ends_that_text_alone(healthy: Path, tmp_path: Path) -> None:
    folder = tmp_path / "qwen3"
    shutil.copytree(healthy, folder)
    async with running(healthy) as harness:
        company = Company(harness, healthy)
        await company.check()
        spared = {token for request in company.requests for token in request.samples[0].tokens[len(request.prompt) :]}
        decode = harness.engine.tokenizer.decode
        victim, text = next(
            (tokens, text)
            for tokens in (prompt(20, seed=seed) for seed in range(100))
            if (text := reference_text(healthy, tuple(tokens), 30))
            and single_character_token(text, spared, decode) is not None
        )
        place = single_character_token(text, spared, decode)
        assert place is not None
    break_decoder(folder, decode([text[place]]))
    async with running(folder, stream_interval_s=0) as harness:
        company = Company(harness, healthy)
        request = harness.submit(victim, max_tokens=30, ignore_eos=True)
        await fails(harness, request, Reason.TOKENIZER_FAILED)
        assert 0 < request.usage.output_token_count <= place + 2, "one more may have been under way"
        await company.check()
        assert await harness.free_block_count() == BLOCKS
        assert harness.engine.telemetry.failures == {FailureKind.TOKENIZER: 1}
