"""Drafts by prompt lookup: the drafted tokens are right, and drafts never change a text."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from quire.errors import UsageError
from quire_worker.cache import KVCache
from quire_worker.model.batch import ForwardBatch
from quire_worker.model.paged_model import PagedModel
from quire_worker.model.tokenizer import Tokenizer
from quire_worker.process.options import parse_arguments
from quire_worker.speculation.drafting import drafting_of
from quire_worker.speculation.lookup import PromptLookup, Seen

from tests.worker.engine_harness import paged_model, prompt, reference_text, running
from tests.worker.speculation_scene import check_same, texts_of
from tests.worker.state_models import write_with_states
from tests.worker.tiny_models import write_tiny, write_tiny_llama

DEMO = Path("models/demo")
SENTENCE = "The for statement is used to iterate over the"
ANOTHER = "The while statement is used for repeated execution."
LOOKUP = PromptLookup(token_count=5, ngram_min=2, ngram_max=4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny") / "llama")


def followed_naively(tokens: Sequence[int], ngram_min: int, ngram_max: int, count: int) -> list[int]:
    """Drafts by vLLM's rule: the tokens after the first occurrence of the longest n-gram that ends the text."""
    for size in range(min(ngram_max, len(tokens) - 1), ngram_min - 1, -1):
        for start in range(len(tokens) - size):
            if list(tokens[start : start + size]) == list(tokens[-size:]):
                return list(tokens[start + size : start + size + count])
    return []


@pytest.mark.parametrize("seed", range(8))
def test_a_draft_is_what_followed_the_longest_ngram_where_it_was_first(seed: int) -> None:
    dice = random.Random(seed)
    ngram_min = dice.randrange(1, 4)
    ngram_max = dice.randrange(ngram_min, 7)
    seen, tokens, kinds = Seen(ngram_min, ngram_max), [0], dice.choice([4, 9])
    found_count = refused_count = 0
    for _ in range(120):
        tokens += [dice.randrange(kinds) for _ in range(dice.randrange(4))]
        may_follow = [bool(followed_naively([*tokens, token], ngram_min, ngram_max, 1)) for token in range(kinds)]
        assert seen.may_follow_next(tokens) or not any(may_follow)
        refused_count += not seen.may_follow_next(tokens)
        count = dice.randrange(1, 9)
        found = list(seen.following(tokens, count))
        assert found == followed_naively(tokens, ngram_min, ngram_max, count)
        found_count += bool(found)
    assert found_count >= 5
    assert refused_count > 5 or ngram_min <= 2


@pytest.mark.parametrize(
    ("blocks", "batch_tokens", "ahead_tokens"), [(512, 64, 64), (512, 13, 0), (20, 64, 64)], ids=str
)
async def test_texts_are_the_same_with_drafts_and_without(
    folder: Path, blocks: int, batch_tokens: int, ahead_tokens: int
) -> None:
    async with running(folder) as harness:
        plain = await texts_of(harness)
        assert harness.engine.telemetry.drafted_token_count == 0
    options: dict[str, Any] = {"blocks": blocks, "batch_tokens": batch_tokens, "ahead_tokens": ahead_tokens}
    async with running(folder, drafting=LOOKUP, **options) as harness:
        drafted = await texts_of(harness)
        numbers = harness.engine.telemetry
        assert 0 < numbers.accepted_token_count < numbers.drafted_token_count
        assert await harness.free_block_count() == blocks
    check_same(drafted, plain)


async def test_greedy_text_is_that_of_transformers_in_fewer_passes() -> None:
    tokens = Tokenizer(DEMO).encode(
        f"{SENTENCE} elements of a sequence. {ANOTHER}\n" * 2 + "The for statement is used to"
    )
    async with running(DEMO, drafting=PromptLookup(8, 1, 3)) as harness:
        output = await harness.generate(tokens, max_tokens=100, ignore_eos=True)
        numbers = harness.engine.telemetry
        assert numbers.accepted_token_count >= 10
        assert numbers.step_seconds.buckets()[-1][1] <= 100 + len(tokens) // 64 - numbers.accepted_token_count
    assert output.tokens[0] == reference_text(DEMO, tuple(tokens), 100)


async def test_a_text_ends_where_it_would_though_more_was_accepted(folder: Path) -> None:
    tokens = prompt(6, seed=2) * 6
    async with running(folder) as harness:
        whole = (await harness.generate(tokens, max_tokens=40, ignore_eos=True)).tokens[0]
        stop = whole[len(whole) // 2]
        options = [
            {"max_tokens": 40, "ignore_eos": True, "stop_token_ids": (stop,)},
            *({"max_tokens": count, "ignore_eos": True} for count in range(1, 9)),
        ]
        plain = [await harness.generate(tokens, **each) for each in options]  # type: ignore[arg-type]
    async with running(folder, drafting=LOOKUP) as harness:
        for each, expected in zip(options, plain, strict=True):
            found = await harness.generate(tokens, **each)  # type: ignore[arg-type]
            assert (found.tokens, found.reasons) == (expected.tokens, expected.reasons)
            assert found.request.usage.output_token_count == expected.request.usage.output_token_count


async def test_windows_let_go_of_nothing_that_a_rejected_draft_still_needs(tmp_path: Path) -> None:
    folder = write_tiny("gemma3", tmp_path)
    tokens = prompt(7, seed=3) * 8
    async with running(folder, drafting=LOOKUP) as harness:
        output = await harness.generate(tokens, max_tokens=60)
        assert harness.engine.telemetry.drafted_token_count > 0
    assert output.tokens[0] == reference_text(folder, tuple(tokens), 60)


async def test_a_pass_that_fails_with_drafts_is_computed_without(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, whole, failures = prompt(6, seed=2) * 6, PagedModel.forward, []

    def without_drafts(model: PagedModel, batch: ForwardBatch, *rest: Any) -> torch.Tensor:
        if 1 < batch.input_ids.shape[1] <= 1 + LOOKUP.token_count:
            failures.append(batch)
            raise torch.OutOfMemoryError
        return whole(model, batch, *rest)

    monkeypatch.setattr(PagedModel, "forward", without_drafts)
    async with running(folder, drafting=LOOKUP) as harness:
        output = await harness.generate(tokens, max_tokens=30, ignore_eos=True)
        assert failures
        assert harness.engine.telemetry.retry_count == len(failures)
        assert harness.engine.telemetry.accepted_token_count == 0
    monkeypatch.undo()
    async with running(folder) as harness:
        assert output.tokens == (await harness.generate(tokens, max_tokens=30, ignore_eos=True)).tokens


async def test_drafts_outlive_the_allocator(folder: Path) -> None:
    tokens = prompt(6, seed=2) * 6
    async with running(folder) as harness:
        plain = await harness.generate(tokens, max_tokens=150, ignore_eos=True)
    async with running(folder, drafting=LOOKUP) as harness:
        request = harness.submit(tokens, max_tokens=150, ignore_eos=True)
        task = asyncio.create_task(harness.collect(request))
        while request.usage.output_token_count < 20:
            await asyncio.sleep(0)
        await harness.replace_allocator()
        assert (await task).tokens == plain.tokens
        assert await harness.free_block_count() == 512


def test_the_command_line_says_how_tokens_are_drafted_and_refuses_models_with_states(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    attention = KVCache(paged_model(write_tiny_llama(tmp_path / "attention")).cache_spec, 4)
    states = KVCache(paged_model(write_with_states("Lfm2", tmp_path / "states")).cache_spec, 4)
    off, on = (parse_arguments(["--model", "x", *more]) for more in ([], ["--speculative-tokens", "4"]))
    assert drafting_of(off, states.spec.groups) is None
    assert drafting_of(on, attention.spec.groups) == PromptLookup(4, 5, 5)
    with pytest.raises(UsageError, match="--speculative-tokens does not support models with recurrent states"):
        drafting_of(on, states.spec.groups)
    for wrong in (["--speculative-tokens", "65"], ["--prompt-lookup-min", "6"], ["--prompt-lookup-min", "0"]):
        with pytest.raises(SystemExit):
            parse_arguments(["--model", "x", *wrong])
        assert "must" in capsys.readouterr().err
