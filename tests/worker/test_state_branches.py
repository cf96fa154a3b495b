"""Branches of models with recurrent states: states are shared, copied and given back, but never step back."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest
from quire_worker.calls.branches import Branches

from tests.worker.branch_scene import (
    count_tokens,
    generate,
    mix_calls,
    reference_logprobs,
    release_all,
    root_of,
)
from tests.worker.engine_harness import prompt, reference_text, running
from tests.worker.state_models import write_with_states
from tests.worker.test_states import spare_pool_of

FAMILIES = ["Bamba", "Qwen3Next"]  # Bamba's states have one size, and Qwen3-Next's have two sizes.


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    tiny = tmp_path_factory.mktemp("states")
    return {family: write_with_states(family, tiny / family) for family in FAMILIES}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("length", [1, 2, 16, 17, 33, 100])
async def test_branches_extended_forked_and_scored_are_as_transformers_has_them(
    folders: dict[str, Path], family: str, length: int
) -> None:
    folder, tokens, question = folders[family], prompt(length, seed=length), prompt(7, seed=900)
    candidates = [prompt(count, seed=count) for count in (1, 2, 16, 30)]
    async with running(folder, blocks=spare_pool_of(folder, 200) * 4) as harness:
        branches = Branches(harness.engine)
        root = await root_of(branches, tokens)
        left, right = await branches.fork(root, 2, "fork")
        assert await branches.extend(left, question, "left") == length + 7
        *texts, scores = await asyncio.gather(
            generate(branches, left, 12, ignore_eos=True),
            generate(branches, right, 9, ignore_eos=True),
            branches.score(root, candidates, ""),
        )
        work = count_tokens(harness)
        again = await generate(branches, left, 5, ignore_eos=True)
        assert sum(work) == 5, "the state of the text so far was kept"
        rest = await generate(branches, root, 20, ignore_eos=True)
        await release_all(branches)
        assert await harness.free_block_count() == harness.engine.cache.block_count
    asked = (*tokens, *question)
    for text, given in ((texts[0] + again, asked), (texts[1], tokens), (rest, tokens)):
        expected = reference_text(folder, tuple(given), len(text))
        assert text[: len(expected)] == expected
    for candidate, logprobs in zip(candidates, scores.logprobs, strict=True):
        assert logprobs == pytest.approx(reference_logprobs(folder, tokens, candidate), abs=2e-4)


@pytest.mark.parametrize("family", FAMILIES)
async def test_a_text_that_a_stop_token_ends_is_computed_again(folders: dict[str, Path], family: str) -> None:
    folder, tokens, more = folders[family], prompt(30, seed=4), prompt(3, seed=5)
    greedy = reference_text(folder, tuple(tokens), 12)
    stop = next(token for token in greedy if greedy.index(token) >= 2)
    kept = greedy[: greedy.index(stop)]
    async with running(folder, blocks=spare_pool_of(folder, 200) * 4) as harness:
        branches = Branches(harness.engine)
        root = await root_of(branches, tokens)
        assert await generate(branches, root, 12, stop_token_ids=(stop,)) == kept
        await branches.extend(root, more, "more")
        text = await generate(branches, root, 8, ignore_eos=True)
    expected = reference_text(folder, (*tokens, *kept, *more), 8)
    assert text[: len(expected)] == expected


@pytest.mark.parametrize("family", FAMILIES)
async def test_any_mix_of_calls_ends_in_any_pool_with_the_text_of_transformers(
    folders: dict[str, Path], family: str
) -> None:
    folder, dice = folders[family], random.Random(7)
    async with running(folder, blocks=spare_pool_of(folder, 24), batch_tokens=32, running_max=3) as harness:
        await mix_calls(harness, folder, dice, rounds=8)
