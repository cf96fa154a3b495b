"""Branches with a real model and a real allocator: texts and scores as transformers', and the number of blocks."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest
from quire.errors import QuireError, Reason
from quire.protocol.permissions import EVERYTHING, permissions_of
from quire_worker.calls.branches import Branches
from quire_worker.sampling.params import SamplingParams
from quire_worker.scheduling.output import Delivery

from tests.worker.branch_scene import (
    count_tokens,
    generate,
    held_block_count,
    mix_calls,
    reference_logprobs,
    release_all,
    root_of,
)
from tests.worker.engine_harness import BLOCK_SIZE, prompt, reference_text, running
from tests.worker.tiny_models import write_tiny_llama

DEMO = Path("models/demo").resolve()


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("models") / "llama")


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 31, 32, 33, 100])
async def test_branches_extended_and_forked_give_the_text_of_transformers(llama: Path, length: int) -> None:
    tokens, question, other = prompt(length, seed=length), prompt(7, seed=900), prompt(16, seed=901)
    async with running(llama) as harness:
        branches = Branches(harness.engine)
        root = await root_of(branches, tokens)
        left, right = await branches.fork(root, 2, "fork")
        assert await branches.extend(left, question, "left") == length + 7
        texts = await asyncio.gather(
            generate(branches, left, 12, ignore_eos=True),
            generate(branches, right, 9, ignore_eos=True),
            generate(branches, root, 20, ignore_eos=True),
        )
        assert left.tokens == [*tokens, *question, *texts[0]]
        await branches.extend(left, other, "more")
        again = await generate(branches, left, 5, ignore_eos=True)
        await release_all(branches)
        assert await harness.free_block_count() == 512
    for text, given, count in ((texts[0], [*tokens, *question], 12), (texts[1], tokens, 9), (texts[2], tokens, 20)):
        expected = reference_text(llama, tuple(given), count)
        assert text[: len(expected)] == expected
    expected = reference_text(llama, (*tokens, *question, *texts[0], *other), 5)
    assert again[: len(expected)] == expected


async def test_a_prompt_is_computed_once_for_all_its_branches(llama: Path) -> None:
    tokens = prompt(200, seed=1)
    async with running(llama) as harness:
        branches = Branches(harness.engine)
        root = await root_of(branches, tokens)
        assert await held_block_count(harness) == -(-199 // BLOCK_SIZE)
        children = await branches.fork(root, 8, "fork")
        assert await held_block_count(harness) == -(-199 // BLOCK_SIZE), "forks take no block"
        work = count_tokens(harness)
        texts = await asyncio.gather(*(generate(branches, child, 4, ignore_eos=True) for child in children))
        assert sum(work) == 8 * 4, "the last token of the prompt, and all but the last that were generated"
        assert len(set(texts)) == 1
        held = await held_block_count(harness)
        assert held == 12 + 1 + 8, "what they share, and each the block of its tail; the room ahead is given back"
        await branches.release([root.id], EVERYTHING)
        assert await held_block_count(harness) == held - 1, "a branch survives its root"
        assert await generate(branches, children[0], 3, ignore_eos=True)
        await release_all(branches)
        assert await harness.free_block_count() == 512


@pytest.mark.parametrize("length", [1, 16, 17, 90])
async def test_scores_are_the_logprobs_of_transformers(llama: Path, length: int) -> None:
    tokens = prompt(length, seed=length)
    candidates = [prompt(count, seed=count) for count in (1, 2, 15, 16, 17, 40, 100)]
    candidates += [[*candidates[5], 7], candidates[0]]
    async with running(llama, running_max=4) as harness:
        branches = Branches(harness.engine)
        root = await root_of(branches, tokens)
        work = count_tokens(harness)
        found = await branches.score(root, candidates, "score")
        assert sum(work) == sum(map(len, candidates))
        again = await branches.score(root, candidates, "again")
        await release_all(branches)
        assert await harness.free_block_count() == 512
    for candidate, logprobs, repeated in zip(candidates, found.logprobs, again.logprobs, strict=True):
        expected = reference_logprobs(llama, tokens, candidate)
        assert logprobs == pytest.approx(expected, abs=2e-4)
        assert repeated == pytest.approx(expected, abs=2e-4)


async def test_candidates_that_wait_for_each_other_have_the_same_scores(llama: Path) -> None:
    tokens, candidates = prompt(50, seed=2), [[*prompt(60, seed=3), *prompt(n, seed=n)] for n in range(1, 9)]
    async with running(llama, blocks=12, batch_tokens=12) as harness:
        branches = Branches(harness.engine)
        root = await root_of(branches, tokens)
        older = harness.submit(prompt(70, seed=5), max_tokens=100, ignore_eos=True)
        found, output = await asyncio.gather(branches.score(root, candidates, ""), harness.collect(older))
        assert len(output.tokens[0]) == 100
    for candidate, logprobs in zip(candidates, found.logprobs, strict=True):
        assert logprobs == pytest.approx(reference_logprobs(llama, tokens, candidate), abs=2e-4)


async def test_a_stop_token_is_no_part_of_a_branch_and_what_follows_is_as_if_it_had_not_been_drawn(llama: Path) -> None:
    tokens, more = prompt(30, seed=4), prompt(3, seed=5)
    greedy = reference_text(llama, tuple(tokens), 12)
    stop = next(token for token in greedy if greedy.index(token) >= 2)
    kept = greedy[: greedy.index(stop)]
    async with running(llama) as harness:
        branches = Branches(harness.engine)
        root = await root_of(branches, tokens)
        company = asyncio.create_task(harness.generate(prompt(9), max_tokens=60, ignore_eos=True))
        assert await generate(branches, root, 12, stop_token_ids=(stop,)) == kept
        assert root.tokens == [*tokens, *kept]
        await branches.extend(root, more, "more")
        text = await generate(branches, root, 8, ignore_eos=True)
        await company
    expected = reference_text(llama, (*tokens, *kept, *more), 8)
    assert text[: len(expected)] == expected


async def test_idle_branches_keep_nobody_waiting_and_are_computed_again_when_they_are_used(llama: Path) -> None:
    stems = [prompt(60, seed=i) for i in range(6)]  # each stem needs 4 blocks, and the pool has 16
    async with running(llama, blocks=16) as harness:
        branches = Branches(harness.engine)
        roots = [await root_of(branches, stem) for stem in stems]
        assert branches.count == 6
        assert branches.held_count < 6, "the pool has no room for all of them"
        big = await harness.generate(prompt(150, seed=9), max_tokens=60, ignore_eos=True)
        assert len(big.tokens[0]) == 60
        texts = await asyncio.gather(*(generate(branches, root, 20, ignore_eos=True) for root in roots))
        await release_all(branches)
        assert await harness.free_block_count() == 16
    for stem, text in zip(stems, texts, strict=True):
        expected = reference_text(llama, tuple(stem), 20)
        assert text[: len(expected)] == expected


@pytest.mark.parametrize("seed", range(4))
async def test_any_mix_of_calls_ends_in_any_pool_with_the_text_of_transformers(llama: Path, seed: int) -> None:
    dice = random.Random(seed)
    async with running(llama, blocks=dice.choice((10, 14, 24, 60)), batch_tokens=32, running_max=3) as harness:
        await mix_calls(harness, llama, dice, rounds=12)


async def test_branches_outlive_an_allocator_that_comes_back_empty(llama: Path) -> None:
    tokens = prompt(70, seed=6)
    async with running(llama) as harness:
        branches = Branches(harness.engine)
        root = await root_of(branches, tokens)
        (child,) = await branches.fork(root, 1, "fork")
        await harness.replace_allocator()
        texts = [await generate(branches, each, 10, ignore_eos=True) for each in (root, child)]
    expected = reference_text(llama, tuple(tokens), 10)
    assert [text[: len(expected)] for text in texts] == [expected, expected]


async def test_a_call_that_is_cancelled_leaves_the_branch_as_it_was(llama: Path) -> None:
    tokens = prompt(40, seed=7)
    async with running(llama) as harness:
        branches = Branches(harness.engine)
        root = await root_of(branches, tokens)
        async with branches.generating(root, SamplingParams(max_tokens=50, ignore_eos=True), "") as request:
            first = await request.output.deliveries.get()
            assert isinstance(first, Delivery)
        assert root.tokens == tokens
        scoring = asyncio.create_task(branches.score(root, [prompt(30, seed=i) for i in range(9)], ""))
        await asyncio.sleep(0)
        scoring.cancel()
        await asyncio.gather(scoring, return_exceptions=True)
        assert await generate(branches, root, 6) == reference_text(llama, tuple(tokens), 6)
        await release_all(branches)
        assert await harness.free_block_count() == 512


async def test_a_branch_that_nobody_names_ends_with_its_time_and_one_that_is_renewed_does_not(llama: Path) -> None:
    now_s = 0.0
    async with running(llama) as harness:
        branches = Branches(harness.engine, clock=lambda: now_s)
        short = await root_of(branches, prompt(20, seed=1), ttl_s=60.0)
        kept = await root_of(branches, prompt(20, seed=2), ttl_s=60.0)
        now_s = 59.0
        assert branches.renew([kept.id, b"?" * 16], EVERYTHING) == [b"?" * 16]
        now_s = 60.0
        branches._sweep()
        with pytest.raises(QuireError, match="released or expired") as caught:
            branches.find(short.id, EVERYTHING)
        assert caught.value.reason is Reason.BRANCH_UNKNOWN
        assert await held_block_count(harness) == 2
        async with branches.generating(kept, SamplingParams(max_tokens=2), ""):
            now_s = 1_000.0
            branches._sweep()
            assert branches.count == 1, "it is used"
        now_s = 1_060.0
        branches._sweep()
        assert branches.count == 0
        assert await harness.free_block_count() == 512


async def test_there_are_only_so_many_branches_and_a_refused_fork_makes_none(llama: Path) -> None:
    async with running(llama) as harness:
        branches = Branches(harness.engine, count_max=4)
        root = await root_of(branches, prompt(20))
        await branches.fork(root, 2, "two")
        with pytest.raises(QuireError, match="at most 8 branches") as caught:
            await branches.fork(root, 2, "two more")
        assert caught.value.reason is Reason.LIMIT
        assert branches.count == 3
        with pytest.raises(QuireError) as caught:
            await branches.extend(root, prompt(5000), "long")
        assert caught.value.reason is Reason.PROMPT_TOO_LONG


async def test_a_repeated_call_is_applied_once(llama: Path) -> None:
    async with running(llama) as harness:
        branches = Branches(harness.engine)
        root = await root_of(branches, prompt(20))
        assert await branches.extend(root, prompt(5), "one") == await branches.extend(root, prompt(5), "one") == 25
        assert await branches.fork(root, 2, "two") == await branches.fork(root, 2, "two")
        assert branches.count == 3


async def test_usage_counts_blocks_once_whenever_room_ahead_is_given_back(llama: Path) -> None:
    counts: dict[int, list[list[int]]] = {}
    async with running(llama) as harness:
        branches = Branches(harness.engine)
        for length in (15, 16, 17, 24):
            for is_settled in (False, True):
                root = await root_of(branches, prompt(length, seed=length))
                found = []
                for stops_at in (7, 8, 7, 7):  # The first token is always 7, so a stop at 8 never happens.
                    sampling = SamplingParams(12, ignore_eos=True, allowed_token_ids=(7,), stop_token_ids=(stops_at,))
                    before = -(-(len(root.tokens) - 1) // BLOCK_SIZE)
                    async with branches.generating(root, sampling, "") as request:
                        while not request.output.is_read:
                            request.output.is_read = (await request.output.deliveries.get()).is_last  # type: ignore[union-attr]
                        if is_settled:
                            await harness.free_block_count()  # waits for the step that frees unused blocks
                        found.append(before + request.usage.granted_block_count)
                        used = -(-(len(request.samples[0].tokens) - 1) // BLOCK_SIZE)
                        assert used <= found[-1] <= used + 1, "the last token has its block, too"
                counts.setdefault(length, []).append(found)
        await release_all(branches)
    assert all(each == ways[0] for ways in counts.values() for each in ways), counts


async def test_whoever_releases_a_branch_that_another_call_releases_is_content(llama: Path) -> None:
    async with running(llama) as harness:
        branches = Branches(harness.engine)
        root = await root_of(branches, prompt(20, seed=1))
        other = await root_of(branches, prompt(20, seed=2))
        text = asyncio.create_task(generate(branches, root, 20, ignore_eos=True))
        await asyncio.sleep(0)
        await asyncio.gather(text, *(branches.release([root.id, other.id], EVERYTHING) for _ in range(3)))
        assert branches.count == 0


async def test_a_branch_has_the_priority_and_the_deadline_of_its_call(llama: Path) -> None:
    async with running(llama) as harness:
        branches = Branches(harness.engine)
        root = await root_of(branches, prompt(20, seed=1))
        sampling = SamplingParams(4)
        async with branches.generating(root, sampling, "", priority=3, time_left_s=100.0) as request:
            assert request.priority == 3
            assert 0 < request.deadline_s - request.arrived_s <= 100
        with pytest.raises(QuireError) as raised:
            async with branches.generating(root, sampling, "", time_left_s=-1.0):
                pass
        assert raised.value.reason is Reason.DEADLINE
        assert len(await generate(branches, root, 4, ignore_eos=True)) == 4


async def test_a_list_has_the_branches_of_the_callers_namespaces_and_its_ids_only_release_them(llama: Path) -> None:
    """A caller cannot continue, fork or renew a branch with the ids of a list."""
    now_s, ours, theirs = 100.0, permissions_of(["quire://namespace/a"]), permissions_of(["quire://namespace/b"])
    async with running(llama) as harness:
        branches = Branches(harness.engine, clock=lambda: now_s)
        assert branches.listed(EVERYTHING) == []
        first = await root_of(branches, prompt(40), namespace="a", ttl_s=60)
        now_s += 2.5
        (second,) = await branches.fork(first, 1, "fork")
        other = await root_of(branches, prompt(5), namespace="b")
        of_first, of_second = branches.listed(ours)
        assert [each.namespace for each in branches.listed(EVERYTHING)] == ["a", "a", "b"]
        assert [each.id_prefix for each in branches.listed(theirs)] == [other.id[:8]]
        assert (of_first.id_prefix, of_second.id_prefix) == (first.id[:8], second.id[:8])
        assert (of_first.age_s, of_second.age_s, of_first.time_left_s, of_first.ttl_ms) == (2.5, 0.0, 60.0, 60_000)
        assert (of_first.token_count, of_first.block_count) == (40, -(-39 // BLOCK_SIZE))
        assert first.sample is not None
        assert of_first.sequence_id == first.sample.sequence_id
        assert first.expires_s == now_s + 60
        now_s += 1
        assert branches.listed(ours)[0].time_left_s == 59.0, "a list renews nothing"

        async with branches.generating(second, SamplingParams(4), "in use"):
            assert [each.is_in_use for each in branches.listed(ours)] == [False, True]
        with pytest.raises(QuireError) as caught:
            branches.find(of_first.id_prefix, EVERYTHING)
        assert caught.value.reason is Reason.BRANCH_UNKNOWN
        assert branches.renew([of_first.id_prefix], EVERYTHING) == [of_first.id_prefix]

        assert await branches.release([of_first.id_prefix], theirs) == 0
        assert await branches.release([of_first.id_prefix, of_first.id_prefix, bytes(8), b"", first.id], ours) == 1
        assert [each.id_prefix for each in branches.listed(EVERYTHING)] == [second.id[:8], other.id[:8]]
        await release_all(branches)
        assert await harness.free_block_count() == 512


async def test_a_list_tells_which_branch_has_given_its_blocks_back(llama: Path) -> None:
    async with running(llama, blocks=16) as harness:
        branches = Branches(harness.engine)
        roots = [await root_of(branches, prompt(60, seed=seed)) for seed in range(3)]
        await harness.generate(prompt(150, seed=9), max_tokens=60, ignore_eos=True)
        listed = branches.listed(EVERYTHING)
        dropped = [each for each in listed if not each.block_count]
        assert dropped
        assert {each.sequence_id for each in dropped} == {0}
        assert sum(each.block_count > 0 for each in listed) == branches.held_count
        await branches.extend(roots[0], prompt(3), "again")
        assert branches.listed(EVERYTHING)[0].block_count == 4
