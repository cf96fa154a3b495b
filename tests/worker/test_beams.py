"""Beam search, alone and through the engine, compared with transformers' `generate(num_beams=...)`."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from quire_worker.sampling.beam_search import BeamRule, BeamSearch, Hypothesis, row_count
from quire_worker.sampling.logprobs import likeliest
from quire_worker.sampling.params import EarlyStopping, SamplingParams
from quire_worker.scheduling.output import FinishReason
from quire_worker.scheduling.request import Sample

from tests.worker.engine_harness import BLOCK_SIZE, Output, prompt, reference_model, running
from tests.worker.state_models import STATE_FAMILIES, write_with_states
from tests.worker.test_families import pool_of
from tests.worker.tiny_models import write_tiny, write_tiny_llama

STOPPINGS = {EarlyStopping.HEURISTIC: False, EarlyStopping.ALWAYS: True, EarlyStopping.NEVER: "never"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny") / "llama")


def found_by_transformers(
    folder: Path, tokens: list[int], rule: BeamRule, n: int
) -> list[tuple[tuple[int, ...], float]]:
    """Returns texts without their end tokens, and their scores."""
    ends = sorted(rule.end_token_ids)
    found = reference_model(folder).generate(
        torch.tensor([tokens]),
        attention_mask=torch.ones(1, len(tokens)),
        do_sample=False,
        num_beams=rule.beam_count,
        num_return_sequences=n,
        length_penalty=rule.length_penalty,
        early_stopping=STOPPINGS[rule.early_stopping],
        max_new_tokens=rule.token_count_max,
        min_new_tokens=rule.token_count_min or None,
        eos_token_id=ends or None,
        pad_token_id=0,
        output_scores=True,
        return_dict_in_generate=True,
    )
    texts = []
    for row in found.sequences[:, len(tokens) :].tolist():
        end = next((place for place, token in enumerate(row) if token in rule.end_token_ids), len(row))
        texts.append(tuple(row[:end]))
    return list(zip(texts, found.sequences_scores.tolist(), strict=True))


def found_by_search(folder: Path, tokens: list[int], rule: BeamRule) -> list[Hypothesis]:
    """Returns the result of the worker's search, with the likeliest tokens of transformers' model."""
    search, texts, rows = BeamSearch(rule), [tokens], row_count(rule.beam_count, rule.end_token_ids)
    while texts:
        with torch.inference_mode():
            logits = reference_model(folder)(torch.tensor(texts)).logits[:, -1].float()
        chosen = search.advance([likeliest(row, rows) for row in logits])
        texts = [[*texts[each.beam], each.token_id] for each in chosen]
    return search.hypotheses


def liked_tokens(folder: Path, tokens: list[int], count: int, dice: random.Random) -> frozenset[int]:
    """Returns tokens that the model is likely to choose somewhere, to use as end tokens."""
    greedy = reference_model(folder).generate(
        torch.tensor([tokens]), attention_mask=torch.ones(1, len(tokens)), max_new_tokens=24, do_sample=False,
        eos_token_id=None, pad_token_id=0,
    )[0, len(tokens) + 2 :].tolist()  # fmt: skip
    return frozenset(dice.sample(greedy, count))


@pytest.mark.parametrize("seed", range(12))
def test_a_search_chooses_what_transformers_chooses(folder: Path, seed: int) -> None:
    dice = random.Random(seed)
    tokens = prompt(dice.randrange(1, 40), seed=seed)
    rule = BeamRule(
        dice.choice([2, 3, 4, 8]),
        dice.choice([1.0, 0.0, 0.6, 2.0, -1.0]),
        list(EarlyStopping)[seed % 3],
        dice.choice([1, 2, 12, 24]),
        dice.choice([0, 0, 1]),
        liked_tokens(folder, tokens, dice.choice([0, 1, 3]), dice),
    )
    found = found_by_search(folder, tokens, rule)
    expected = found_by_transformers(folder, tokens, rule, rule.beam_count)
    assert [each.token_ids for each in found] == [text for text, _ in expected], rule
    assert [each.score for each in found] == pytest.approx([score for _, score in expected], rel=1e-5)


def sampling_of(rule: BeamRule, n: int) -> dict[str, Any]:
    return {
        "num_beams": rule.beam_count,
        "n": n,
        "length_penalty": rule.length_penalty,
        "early_stopping": rule.early_stopping,
        "max_tokens": rule.token_count_max,
        "min_tokens": rule.token_count_min,
        "ignore_eos": True,
        "stop_token_ids": tuple(rule.end_token_ids),
    }


def assert_is_that_of_transformers(folder: Path, tokens: list[int], rule: BeamRule, output: Output) -> None:
    expected = found_by_transformers(folder, tokens, rule, len(output.tokens))
    assert output.tokens == [text for text, _ in expected], rule
    assert output.scores == pytest.approx([score for _, score in expected], rel=1e-4)


def rules_of(folder: Path, dice: random.Random, tokens: list[int]) -> BeamRule:
    ends = liked_tokens(folder, tokens, dice.choice([0, 1, 2]), dice)
    return BeamRule(dice.choice([2, 4, 6]), dice.choice([1.0, 0.3]), dice.choice(list(EarlyStopping)), 30, 0, ends)


@pytest.mark.parametrize(("blocks", "batch_tokens"), [(512, 64), (24, 16)])
async def test_texts_and_scores_are_those_of_transformers_whoever_else_runs(
    folder: Path, blocks: int, batch_tokens: int
) -> None:
    dice = random.Random(blocks)
    prompts = [prompt(dice.randrange(1, 50), seed=seed) for seed in range(6)]
    rules = [rules_of(folder, dice, tokens) for tokens in prompts]
    async with running(folder, blocks=blocks, batch_tokens=batch_tokens) as harness:
        others = [harness.generate(prompt(9, seed=seed), max_tokens=40) for seed in range(20, 24)]
        outputs, rest = await asyncio.gather(
            asyncio.gather(
                *(
                    harness.generate(tokens, **sampling_of(rule, dice.randrange(1, rule.beam_count + 1)))
                    for tokens, rule in zip(prompts, rules, strict=True)
                )
            ),
            asyncio.gather(*others),
        )
        assert (harness.engine.scheduler.roster.preemption_count > 0) == (blocks < 100)
        assert await harness.free_block_count() == blocks
    assert len(rest) == 4
    for tokens, rule, output in zip(prompts, rules, outputs, strict=True):
        assert_is_that_of_transformers(folder, tokens, rule, output)
        for reason, text in zip(output.reasons, output.tokens, strict=True):
            assert reason is (FinishReason.LENGTH if len(text) == 30 else FinishReason.STOP)


async def test_a_pool_that_holds_one_beam_at_a_time_is_enough(folder: Path) -> None:
    tokens, rule = prompt(40, seed=1), BeamRule(4, 1.0, EarlyStopping.HEURISTIC, 12)
    async with running(folder, blocks=5, batch_tokens=64, running_max=2) as harness:
        output = await harness.generate(tokens, **sampling_of(rule, 2))
        assert harness.engine.scheduler.roster.preemption_count > 0
        assert await harness.free_block_count() == 5
    assert_is_that_of_transformers(folder, tokens, rule, output)


async def test_beams_outlive_the_allocator(folder: Path) -> None:
    tokens, rule = prompt(30, seed=2), BeamRule(4, 1.0, EarlyStopping.NEVER, 40)
    async with running(folder) as harness:
        request = harness.submit(tokens, **sampling_of(rule, 4))
        task = asyncio.create_task(harness.collect(request))
        while request.usage.output_token_count < 40:
            await asyncio.sleep(0)
        await harness.replace_allocator()
        output = await task
        assert await harness.free_block_count() == 512
    assert_is_that_of_transformers(folder, tokens, rule, output)


def blocks_of(samples: list[Sample], length_of: Callable[[Sample], int]) -> int:
    """Returns the fewest blocks that hold `length_of` tokens of each sample.

    Samples with the same tokens up to a block's end share that block.
    """
    return len(
        {
            (place, *sample.tokens[: min((place + 1) * BLOCK_SIZE, length_of(sample))])
            for sample in samples
            for place in range(-(-length_of(sample) // BLOCK_SIZE))
        }
    )


async def test_beams_hold_what_copy_on_write_needs_and_pruned_ones_are_freed_in_the_same_turn(folder: Path) -> None:
    beam_count, tokens = 4, prompt(200, seed=3)
    rule = BeamRule(beam_count, 1.0, EarlyStopping.NEVER, 40)
    async with running(folder, batch_tokens=256) as harness:
        pool = harness.allocator.directory
        request = harness.submit(tokens, **sampling_of(rule, 1))
        task = asyncio.create_task(harness.collect(request))
        looked_at, lengths = 0, set()
        while not task.done():
            await asyncio.sleep(0)
            samples = [sample for sample in request.samples if sample.tables and sample.fork_of is None]
            if len(samples) < beam_count or any(sample.has_ended for sample in samples):
                continue
            own = {block for sample in samples for block in sample.held_blocks()}
            held = 512 - pool.pool("test").pool.blocks.free_count
            assert held == len(own), "somebody holds blocks who was pruned"
            assert blocks_of(samples, lambda sample: sample.computed) <= held
            assert held <= blocks_of(samples, lambda sample: len(sample.tokens))
            looked_at, lengths = looked_at + 1, lengths | {len(samples[0].tokens)}
        await task
        assert looked_at > 30
        assert len(lengths) > 30


async def test_a_cancelled_search_frees_its_beams(folder: Path) -> None:
    async with running(folder) as harness:
        request = harness.submit(prompt(30), num_beams=4, max_tokens=200, ignore_eos=True)
        while request.usage.output_token_count < 20:
            await asyncio.sleep(0)
        harness.engine.cancel(request)
        assert await harness.free_block_count() == 512


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": 0.5}, "temperature cannot be combined with num_beams"),
        ({"logprobs": 1}, "logprobs cannot be combined with num_beams"),
        ({"n": 5}, "n must be at most num_beams=4, not 5"),
        ({"num_beams": 65}, "num_beams must be an integer from 1 to 64"),
        ({"length_penalty": 7.0}, "length_penalty must be from -5"),
        ({"num_beams": 1, "length_penalty": 2.0}, "length_penalty needs num_beams above 1"),
    ],
)
def test_what_does_not_go_with_beams_is_refused_by_its_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SamplingParams(**{"num_beams": 4, **options}).validate()


@pytest.mark.parametrize("family", ["gemma3", "Bamba", "Qwen3Next"])
async def test_windows_and_states_are_forked_with_their_beams(family: str, tmp_path: Path) -> None:
    has_states = family in STATE_FAMILIES
    folder = write_with_states(family, tmp_path) if has_states else write_tiny(family, tmp_path)
    tokens, rule = prompt(37, seed=4), BeamRule(4, 1.0, EarlyStopping.HEURISTIC, 24)
    blocks = pool_of(folder, 128)
    async with running(folder, blocks=blocks) as harness:
        output = await harness.generate(tokens, **sampling_of(rule, 3))
        again = await harness.generate(tokens, **sampling_of(rule, 3))
        assert await harness.free_block_count() == blocks
    assert again.request.usage.cached_token_count == 32
    for found in (output, again):
        assert_is_that_of_transformers(folder, tokens, rule, found)
