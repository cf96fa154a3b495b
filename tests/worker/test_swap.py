"""Pages of preempted samples in host memory: texts stay the same, for all kinds of groups and dtypes."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest
from quire.types import GroupKind, GroupSpec
from quire_worker.cache import KVCache
from quire_worker.execution.host_pages import HostPages
from quire_worker.model.loading import load_model
from quire_worker.model.paged_model import PagedModel
from quire_worker.process.options import parse_arguments
from quire_worker.scheduling.pace import Pace
from quire_worker.scheduling.request import Request, Sample
from quire_worker.scheduling.swap import SwapSpace

from tests.worker.engine_harness import BLOCK_SIZE, prompt, reference_text, running
from tests.worker.pretended_worker import PretendedWorker, lasting_prompts, numbers
from tests.worker.tiny_models import write_tiny, write_tiny_llama

FULL, WINDOW, STATE = GroupKind.FULL_ATTENTION, GroupKind.SLIDING_WINDOW, GroupKind.STATE


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("models") / "llama")


# -- without a model: decisions and tokens -----------------------------------------------------------------------------


@pytest.mark.parametrize("is_pipelined", [False, True])
@pytest.mark.parametrize(
    "groups",
    [[GroupSpec(FULL, 4)], [GroupSpec(FULL, 4), GroupSpec(WINDOW, 4, 10)], [GroupSpec(FULL, 4), GroupSpec(STATE, 16)]],
    ids=["full", "windowed", "states"],
)
def test_who_was_swapped_reads_back_its_own_tokens_and_computes_them_once(
    groups: list[GroupSpec], is_pipelined: bool
) -> None:
    swapped, computed = [0, 0], [0, 0]
    for case, slots in enumerate((0, 1000)):
        for seed in range(4):
            dice = random.Random(seed)
            worker = PretendedWorker(
                block_count=14 * len(groups),
                block_size=4,
                groups=groups,
                batch_tokens=16,
                ahead_tokens=8,
                is_pipelined=is_pipelined,
                swap_slots=slots,
            )
            prompts = [numbers(dice.randint(4, 20), seed=100 * seed + i) for i in range(8)]
            requests = [worker.submit(each, max_tokens=25, n=dice.choice([1, 1, 2])) for each in prompts]
            worker.run()
            for request in requests:
                worker.check_text(request)
            swap = worker.scheduler.roster.swap
            assert swap.free_count == slots
            swapped[case] += swap.swap_count
            computed[case] += worker.prefilled_token_count
    assert swapped[0] == 0
    assert swapped[1] >= 4
    assert computed[1] < computed[0]


def sample_of(token_count: int) -> Sample:
    """Returns a running sample with all tokens computed but the last."""
    worker = PretendedWorker(block_count=64, block_size=4, batch_tokens=256)
    request: Request = worker.submit(lasting_prompts(1, output_tokens=40)[0][:token_count], max_tokens=40)
    worker.turn()
    return request.samples[0]


def test_swapping_is_tried_once_and_then_done_where_it_is_cheaper() -> None:
    pace = Pace()
    pace.observe(100, 1.0)  # Computing takes 10 ms per token.
    swap = SwapSpace(16, pace)
    sample = sample_of(20)  # The sample has five blocks.
    assert swap.swap_out(sample, 0, 4) is not None, "nobody knows what it costs"
    swap.release(sample)
    # A copy takes 10 ms per block, so copying five blocks out and back takes 100 ms. Computing their 20 tokens again
    # takes 200 ms.
    swap.cost.block_count, swap.cost.seconds = 10, 0.1
    assert swap.swap_out(sample, 0, 4) is not None
    swap.release(sample)
    swap.cost.seconds = 0.3
    assert swap.swap_out(sample, 0, 4) is None, "300 ms both ways"
    swap.cost.seconds = 0.1
    assert swap.swap_out(sample, 20, 4) is None, "others hold all of it"
    kept = swap.swap_out(sample, 16, 4)
    assert kept is not None
    assert len(kept.blocks) == 1, "others hold the rest"
    swap.release(sample)
    assert swap.free_count == 16


def test_what_does_not_fit_the_budget_is_computed_again() -> None:
    swap = SwapSpace(4, Pace())
    sample = sample_of(20)
    assert swap.swap_out(sample, 0, 4) is None
    assert sample.swapped is None
    assert swap.free_count == 4


# -- with pages and models ---------------------------------------------------------------------------------------------


def test_pages_of_all_buffers_come_back_byte_by_byte(folder: Path) -> None:
    cache = KVCache(load_model(folder, block_size=BLOCK_SIZE).cache_spec, 12)
    for number, buffer in enumerate(cache.buffers):
        buffer.random_(generator=None)
        buffer[3] = 0xFF - number  # In some dtypes, these bytes are NaN.
    before = [buffer.clone() for buffer in cache.buffers]
    host = HostPages(cache, 5)
    host.copy_out([3, 7, 1], [4, 0, 2])
    for buffer in cache.buffers:
        buffer.zero_()
    host.copy_in([0, 4, 2], [10, 11, 0])
    for buffer, old in zip(cache.buffers, before, strict=True):
        assert buffer[10].equal(old[7])
        assert buffer[11].equal(old[3])
        assert buffer[0].equal(old[1])
        assert not buffer[1:10].any()


async def texts_of(
    folder: Path, model: PagedModel, *, blocks: int, swap_slots: int, tokens: int
) -> tuple[list[tuple[int, ...]], int]:
    """Returns the texts of eight requests, and the number of samples swapped during them."""
    async with running(folder, model=model, blocks=blocks, swap_slots=swap_slots) as harness:
        outputs = await asyncio.gather(
            *(harness.generate(prompt(40, seed=i), max_tokens=tokens, ignore_eos=True) for i in range(8))
        )
        swap = harness.engine.scheduler.roster.swap
        assert await harness.free_block_count() == blocks
        assert swap.free_count == swap.slot_count
        assert (swap.in_count > 0) == (swap.swap_count > 0)
        return [output.tokens[0] for output in outputs], swap.swap_count


async def test_requests_that_are_swapped_give_the_text_of_transformers(folder: Path) -> None:
    texts, swap_count = await texts_of(
        folder, load_model(folder, block_size=BLOCK_SIZE), blocks=12, swap_slots=64, tokens=56
    )
    assert swap_count > 0
    for seed, text in enumerate(texts):
        expected = reference_text(folder, tuple(prompt(40, seed=seed)), 56)
        assert text[: len(expected)] == expected
        assert len(text) == 56


@pytest.mark.parametrize(("family", "dtype"), [("llama", "fp8_e4m3"), ("gemma3", "auto")])
async def test_windows_and_fp8_pages_are_swapped_to_the_same_text(tmp_path: Path, family: str, dtype: str) -> None:
    folder = write_tiny_llama(tmp_path / family) if family == "llama" else write_tiny(family, tmp_path / family)
    model = load_model(folder, block_size=BLOCK_SIZE, kv_cache_dtype=dtype)
    roomy, swap_count = await texts_of(folder, model, blocks=512, swap_slots=0, tokens=56)
    assert swap_count == 0
    # With gemma3, one sequence takes at most 22 blocks.
    for blocks in (12,) if family == "llama" else (32, 40, 48):
        tight, count = await texts_of(folder, model, blocks=blocks, swap_slots=320, tokens=56)
        assert tight == roomy
        swap_count += count
    assert swap_count > 0


def test_the_budget_is_a_size_and_no_share() -> None:
    assert parse_arguments(["--model", "x"]).swap_memory == 0
    assert parse_arguments(["--model", "x", "--swap-memory", "1GiB"]).swap_memory == 1 << 30
    with pytest.raises(SystemExit):
        parse_arguments(["--model", "x", "--swap-memory", "10%"])
