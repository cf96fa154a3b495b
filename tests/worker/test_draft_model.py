"""Drafts by a second model: texts do not depend on them, and the draft model has pages with its own keys.

A model that drafts for itself is always right if its draft pages are right. So a lower acceptance shows a missing key.
"""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from quire.errors import UsageError
from quire_worker.model.checkpoint import UnsupportedModelError
from quire_worker.model.loading import load_model
from quire_worker.model.paged_model import PagedModel
from quire_worker.process.options import parse_arguments
from quire_worker.process.server import load
from quire_worker.speculation.drafting import drafting_of, load_draft_model
from quire_worker.speculation.lookup import Proposals

from tests.worker.branch_scene import mix_calls
from tests.worker.engine_harness import Harness, Output, paged_model, prompt, reference_text, running
from tests.worker.speculation_scene import check_same, texts_of
from tests.worker.state_models import write_with_states
from tests.worker.tiny_models import write_tiny, write_tiny_llama, write_tiny_qwen3


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny") / "llama")


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Writes another model with other heads; its drafts are right now and then by chance."""
    return write_tiny_qwen3(tmp_path_factory.mktemp("tiny") / "qwen3", seed=5, heads=2, kv_heads=1, head_dim=32)


@pytest.mark.parametrize(
    "options",
    [
        {"blocks": 512, "batch_tokens": 64, "ahead_tokens": 64},
        {"blocks": 512, "batch_tokens": 13, "ahead_tokens": 0},
        {"blocks": 20, "batch_tokens": 64, "ahead_tokens": 64},
    ],
    ids=str,
)
@pytest.mark.parametrize("drafts_itself", [True, False])
async def test_texts_are_the_same_with_drafts_and_without(
    llama: Path, stranger: Path, options: dict[str, Any], drafts_itself: bool
) -> None:
    async with running(llama) as harness:
        plain = await texts_of(harness)
    draft_model = paged_model(llama if drafts_itself else stranger)
    async with running(llama, draft_model=draft_model, **options) as harness:
        drafted = await texts_of(harness)
        numbers = harness.engine.telemetry
        assert numbers.drafted_token_count > 0
        assert numbers.accepted_token_count > 0 or not drafts_itself
        assert await harness.free_block_count() == options["blocks"]
    check_same(drafted, plain)


def accepted_share(harness: Harness) -> float:
    numbers = harness.engine.telemetry
    return numbers.accepted_token_count / numbers.drafted_token_count


async def test_a_model_that_drafts_for_itself_is_right_after_hits_forks_and_chunks(llama: Path) -> None:
    prompts = [prompt(length, seed=length) for length in (1, 2, 15, 16, 17, 40, 63, 64, 65, 130)]
    async with running(llama, draft_model=paged_model(llama), drafting=Proposals(3), batch_tokens=48) as harness:
        outputs = await asyncio.gather(
            *(harness.generate(tokens, max_tokens=41, ignore_eos=True) for tokens in prompts)
        )
        again = await asyncio.gather(
            *(harness.generate(tokens, max_tokens=41, ignore_eos=True, n=2) for tokens in prompts)
        )
        assert sum(each.request.usage.cached_token_count for each in again) > 0
        assert accepted_share(harness) == 1.0
        passes = harness.engine.telemetry.step_seconds.buckets()[-1][1]
        alone = await harness.generate(prompts[3], max_tokens=41, ignore_eos=True)
        assert harness.engine.telemetry.step_seconds.buckets()[-1][1] - passes <= 12, "four tokens with each pass"
        assert await harness.free_block_count() == 512
    for tokens, output, hit in zip(prompts, outputs, again, strict=True):
        expected = reference_text(llama, tuple(tokens), 41)
        assert output.tokens[0][: len(expected)] == expected
        assert hit.tokens == [output.tokens[0]] * 2
    assert alone.tokens == outputs[3].tokens


async def test_a_model_that_drafts_for_itself_is_right_after_preemptions(llama: Path) -> None:
    prompts = [prompt(18 + i, seed=i) for i in range(4)]
    async with running(llama, blocks=14, draft_model=paged_model(llama)) as harness:
        outputs = await asyncio.gather(
            *(harness.generate(tokens, max_tokens=70, ignore_eos=True) for tokens in prompts)
        )
        assert harness.engine.scheduler.roster.preemption_count > 0
        assert accepted_share(harness) == 1.0
    for tokens, output in zip(prompts, outputs, strict=True):
        expected = reference_text(llama, tuple(tokens), 70)
        assert output.tokens[0][: len(expected)] == expected


@pytest.mark.parametrize("family", ["gemma3", "gpt_oss", "llama4"])
async def test_models_with_windows_have_drafts_in_the_blocks_of_full_attention(
    llama: Path, tmp_path: Path, family: str
) -> None:
    folder = write_tiny(family, tmp_path)
    prompts = [prompt(length, seed=length) for length in (3, 30, 100)]
    async with running(folder, draft_model=paged_model(llama)) as harness:
        outputs = await asyncio.gather(*(harness.generate(tokens, max_tokens=50) for tokens in prompts))
        assert harness.engine.telemetry.drafted_token_count > 0
        assert await harness.free_block_count() == 512
    for tokens, output in zip(prompts, outputs, strict=True):
        assert output.tokens[0] == reference_text(folder, tuple(tokens), 50)


async def test_branches_and_beams_go_with_drafts(llama: Path) -> None:
    async with running(llama, blocks=40, batch_tokens=32, running_max=3, draft_model=paged_model(llama)) as harness:
        await mix_calls(harness, llama, random.Random(3), rounds=6)
        assert accepted_share(harness) > 0.9
    async with running(llama, draft_model=paged_model(llama)) as harness:
        beams, plain = await asyncio.gather(
            harness.generate(prompt(20), max_tokens=12, num_beams=3), harness.generate(prompt(20), max_tokens=12)
        )
        assert plain.tokens[0] == reference_text(llama, tuple(prompt(20)), 12)
    async with running(llama) as harness:
        assert (await harness.generate(prompt(20), max_tokens=12, num_beams=3)).tokens == beams.tokens


async def test_a_draft_model_that_fails_takes_nothing_but_drafts_away(
    llama: Path, stranger: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft, whole = paged_model(stranger), PagedModel.forward

    def without_draft(model: PagedModel, *given: Any) -> torch.Tensor:
        if model is draft:
            raise torch.OutOfMemoryError
        return whole(model, *given)

    monkeypatch.setattr(PagedModel, "forward", without_draft)
    async with running(llama, draft_model=draft) as harness:
        output = await harness.generate(prompt(30), max_tokens=30)
        assert harness.engine.telemetry.drafted_token_count == 0
    assert output.tokens[0] == reference_text(llama, tuple(prompt(30)), 30)


async def test_drafts_outlive_the_allocator(llama: Path) -> None:
    async with running(llama, draft_model=paged_model(llama)) as harness:
        request = harness.submit(prompt(30), max_tokens=150, ignore_eos=True)
        task = asyncio.create_task(harness.collect(request))
        while request.usage.output_token_count < 20:
            await asyncio.sleep(0)
        await harness.replace_allocator()
        output: Output = await task
        assert accepted_share(harness) == 1.0
    expected = reference_text(llama, tuple(prompt(30)), 150)
    assert output.tokens[0][: len(expected)] == expected


def test_a_worker_takes_the_pages_of_its_draft_model_from_the_pool(llama: Path, stranger: Path) -> None:
    arguments = ["--model", str(llama), "--kv-memory", "1MiB"]
    alone = load(parse_arguments(arguments))
    pair = load(parse_arguments([*arguments, "--draft-model", str(stranger), "--speculative-tokens", "2"]))
    assert alone.drafter is None
    assert pair.drafter is not None
    block_bytes = pair.cache.spec.bytes_per_block, pair.drafter.cache.spec.bytes_per_block
    assert alone.cache.block_count == (1 << 20) // block_bytes[0]
    assert pair.cache.block_count == pair.drafter.cache.block_count == (1 << 20) // sum(block_bytes)


def draft_for(draft: Path, model: Path, block_size: int = 16) -> PagedModel | None:
    """Loads a draft model as the worker does, for a model with blocks of `block_size` tokens."""
    arguments = ["--model", str(model), "--draft-model", str(draft), "--speculative-tokens", "4"]
    target = paged_model(model) if block_size == 16 else load_model(model, block_size=block_size)
    return load_draft_model(parse_arguments(arguments), target, "cpu")


def test_the_draft_models_blocks_are_those_of_the_served_model(llama: Path) -> None:
    draft = draft_for(llama, llama, block_size=8)
    assert draft is not None
    assert draft.cache_spec.block_size == 8


def test_checkpoints_without_a_tokenizer_are_compared_by_the_number_of_tokens(llama: Path, tmp_path: Path) -> None:
    bare = write_tiny_llama(tmp_path / "bare")
    for file in bare.glob("tokenizer*"):
        file.unlink()
    assert draft_for(bare, llama) is not None
    assert draft_for(llama, bare) is not None


def with_other_tokens(folder: Path) -> Path:
    """Swaps two tokens of a folder's tokenizer, and returns the folder."""
    file = folder / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    first, second = list(vocabulary)[-2:]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    file.write_text(json.dumps(tokenizer))
    return folder


def test_a_model_that_cannot_draft_is_refused_and_says_why(
    llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert draft_for(llama, llama) is not None
    with pytest.raises(UnsupportedModelError, match="has layers of full_attention, sliding_window"):
        draft_for(write_tiny("gemma3", tmp_path / "gemma3"), llama)
    with pytest.raises(UsageError, match="has a vocabulary of "):
        draft_for(Path("models/demo"), llama)
    with pytest.raises(UsageError, match=r"the tokenizer of .*other must have the same tokens"):
        draft_for(with_other_tokens(write_tiny_llama(tmp_path / "other")), llama)
    with pytest.raises(UsageError, match="does not support models with recurrent states"):
        draft_for(llama, write_with_states("Lfm2", tmp_path / "states"))
    for more in ([], ["--speculative-tokens", "2", "--tensor-parallel", "2"]):
        with pytest.raises(SystemExit):
            parse_arguments(["--model", "x", "--draft-model", "x", *more])
        assert "--draft-model" in capsys.readouterr().err
    options = parse_arguments(["--model", "x", "--draft-model", "y", "--speculative-tokens", "3"])
    assert drafting_of(options, paged_model(llama).cache_spec.groups) == Proposals(3)
