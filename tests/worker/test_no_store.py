"""Requests that are not to be stored: no other request hits what they compute, and it does not stay cached."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from quire.errors import QuireError, Reason
from quire.protocol.permissions import EVERYTHING
from quire.v1 import worker_pb2 as pb
from quire_worker.calls.branches import Branches
from quire_worker.calls.checks import wish_of
from quire_worker.scheduling.request import Request
from quire_worker.scheduling.slots import CacheWish
from quire_worker.speculation.lookup import PromptLookup

from tests.worker.branch_scene import generate
from tests.worker.engine_harness import Harness, Output, prompt, reference_text, running
from tests.worker.state_models import write_with_states
from tests.worker.test_families import pool_of
from tests.worker.tiny_models import write_tiny, write_tiny_llama

KINDS = ["llama", "gemma3", "Bamba"]  # full attention, windows, states


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    tiny = tmp_path_factory.mktemp("kinds")
    return {
        "llama": write_tiny_llama(tiny / "llama"),
        "gemma3": write_tiny("gemma3", tiny / "gemma3"),
        "Bamba": write_with_states("Bamba", tiny / "Bamba"),
    }


def hidden() -> CacheWish:
    return wish_of(pb.CachePolicy(no_store=True))


def submit(harness: Harness, tokens: Sequence[int], **options: Any) -> Request:
    request = harness.submit(tokens, **options)
    request.wish = hidden()
    return request


async def computed(harness: Harness, tokens: Sequence[int], **options: Any) -> Output:
    return await harness.collect(submit(harness, tokens, **options))


async def cached_block_count(harness: Harness) -> int:
    """Returns the number of cached blocks when the allocator has freed every sequence."""
    pool = harness.allocator.directory.pool("test").pool
    async with asyncio.timeout(60):
        while harness.engine.scheduler.roster.has_work or pool.sequences:
            await asyncio.sleep(0)
    return pool.blocks.cached_count


@pytest.mark.parametrize("kind", KINDS)
async def test_nothing_of_it_stays_and_the_text_is_the_same(folders: dict[str, Path], kind: str) -> None:
    folder, tokens = folders[kind], prompt(100, seed=1)
    async with running(folder, blocks=pool_of(folder, 128)) as harness:
        output = await computed(harness, tokens, max_tokens=40, n=3)
        assert await cached_block_count(harness) == 0
        after = await harness.generate(tokens, max_tokens=40)
    expected = reference_text(folder, tuple(tokens), 40)
    assert output.tokens == [expected] * 3
    assert after.tokens == [expected]
    assert output.request.usage.cache_write_token_count == 0
    assert after.request.usage.cached_token_count == 0


@pytest.mark.parametrize("kind", KINDS)
async def test_it_hits_what_others_have_stored_and_leaves_that_there(folders: dict[str, Path], kind: str) -> None:
    folder, tokens = folders[kind], prompt(64, seed=2)
    longer = tokens + prompt(60, seed=3)
    async with running(folder, blocks=pool_of(folder, 128)) as harness:
        await harness.generate(tokens, max_tokens=2)
        before = await cached_block_count(harness)
        output = await computed(harness, longer, max_tokens=30)
        assert await cached_block_count(harness) == before
        again = await harness.generate(longer, max_tokens=1)
    assert output.tokens[0] == reference_text(folder, tuple(longer), 30)
    assert output.request.usage.cached_token_count >= 48
    assert again.request.usage.cached_token_count == output.request.usage.cached_token_count


async def test_while_it_runs_an_equal_request_waits_for_nothing_and_hits_nothing(folders: dict[str, Path]) -> None:
    tokens = prompt(100, seed=4)
    async with running(folders["llama"]) as harness:
        request = submit(harness, tokens, max_tokens=200, ignore_eos=True)
        running_on = asyncio.create_task(harness.collect(request))
        while request.usage.output_token_count < 40:
            await asyncio.sleep(0)
        beside = await harness.generate(tokens, max_tokens=4)
        assert not running_on.done()
        await running_on
    assert beside.request.usage.cached_token_count == 0


async def test_preempted_ones_finish_with_the_same_text_and_leave_nothing_that_can_be_hit(
    folders: dict[str, Path],
) -> None:
    folder, prompts = folders["llama"], [prompt(40, seed=i) for i in range(8)]
    async with running(folder, blocks=12) as harness:  # Two requests fit.
        outputs = await asyncio.gather(
            *(computed(harness, tokens, max_tokens=56, ignore_eos=True) for tokens in prompts)
        )
        assert harness.engine.scheduler.roster.preemption_count > 0
        after = [await harness.generate(tokens, max_tokens=1) for tokens in prompts]
    assert [each.request.usage.cached_token_count for each in after] == [0] * 8
    for tokens, output in zip(prompts, outputs, strict=True):
        expected = reference_text(folder, tuple(tokens), 56)
        assert output.tokens[0][: len(expected)] == expected


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"n": 2, "best_of": 4}], ids=str)
async def test_drafts_and_beams_leave_nothing(folders: dict[str, Path], options: dict[str, Any]) -> None:
    tokens = (prompt(9, seed=5) * 12)[:100]
    async with running(folders["llama"], drafting=PromptLookup(8, 1, 3)) as harness:
        output = await computed(harness, tokens, max_tokens=50, **options)
        assert await cached_block_count(harness) == 0
        plain = await harness.generate(tokens, max_tokens=50, **options)
    assert output.tokens == plain.tokens
    assert plain.request.usage.cached_token_count == 0


async def test_it_is_hidden_from_an_allocator_that_gets_a_report(folders: dict[str, Path]) -> None:
    tokens = prompt(100, seed=6)
    async with running(folders["llama"]) as harness:
        request = submit(harness, tokens, max_tokens=60, ignore_eos=True)
        task = asyncio.create_task(harness.collect(request))
        while request.usage.output_token_count < 10:
            await asyncio.sleep(0)
        await harness.replace_allocator()
        output = await task
        assert await cached_block_count(harness) == 0
        again = await harness.generate(tokens, max_tokens=60, ignore_eos=True)
    assert output.tokens == again.tokens
    assert again.request.usage.cached_token_count == 0


@pytest.mark.parametrize("is_dropped", [False, True])
async def test_a_branch_and_its_forks_hide_all_that_they_compute(folders: dict[str, Path], is_dropped: bool) -> None:
    folder, tokens, more = folders["llama"], prompt(100, seed=7), prompt(40, seed=8)
    async with running(folder) as harness:
        branches = Branches(harness.engine)
        branch, _ = await branches.prefill(request_id="", tokens=list(tokens), namespace="", ttl_s=600, wish=hidden())
        fork, other = await branches.fork(branch, 2, "fork")
        if is_dropped:
            for each in (branch, fork, other):
                assert each.sample is not None
                harness.engine.scheduler.roster.drop(each.sample)
        await branches.extend(fork, more, "extend")
        await branches.score(other, [more[:20], more[20:]], "score")
        text = await generate(branches, fork, 30)
        assert text == reference_text(folder, (*tokens, *more), 30)
        assert (await harness.generate(tokens, max_tokens=1)).request.usage.cached_token_count == 0
        longer = await harness.generate([*tokens, *more, *text], max_tokens=1)
        assert longer.request.usage.cached_token_count == 96, "what the plain prompt has stored"
        await branches.release([branch.id, fork.id, other.id], EVERYTHING)


def test_it_cannot_be_kept_and_not_be_stored() -> None:
    with pytest.raises(QuireError) as refused:
        wish_of(pb.CachePolicy(no_store=True, keep_ms=1))
    assert (refused.value.reason, refused.value.field) == (Reason.BAD_PARAMETER, "cache.no_store")
    assert len({wish_of(pb.CachePolicy(no_store=True)).secret for _ in range(4)}) == 4


async def test_a_branch_that_was_continued_is_still_asked_to_be_kept(folders: dict[str, Path]) -> None:
    wish = CacheWish(keep_ms=60_000)
    async with running(folders["llama"]) as harness:
        branches = Branches(harness.engine)
        branch, _ = await branches.prefill(request_id="", tokens=prompt(40), namespace="", ttl_s=600, wish=wish)
        await generate(branches, branch, 4)
        assert branch.sample is not None
        assert branch.sample.request.wish == wish
