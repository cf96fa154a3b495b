"""Every parameter through the whole engine, compared with transformers' `generate`, also for disturbed requests."""

from __future__ import annotations

import asyncio
import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from quire.errors import QuireError, Reason
from quire_worker.attention import CpuPagedAttention
from quire_worker.scheduling.output import FinishReason

from tests.worker.engine_harness import Output, prompt, reference_model, running
from tests.worker.tiny_models import write_tiny_llama

DEMO = Path("models/demo")
# These options make a reply depend on everything possible: counts of tokens, single logits, random numbers.
DRAWN: dict[str, Any] = {
    "max_tokens": 30,
    "temperature": 1.1,
    "top_p": 0.95,
    "min_p": 0.01,
    "repetition_penalty": 1.2,
    "frequency_penalty": 0.3,
    "logit_bias": {7: 2.0},
    "min_tokens": 20,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny") / "llama")


def generated_by_transformers(folder: Path, tokens: list[int], **options: Any) -> list[int]:
    model = reference_model(folder)
    output: list[int] = model.generate(
        torch.tensor([tokens]), attention_mask=torch.ones(1, len(tokens)), do_sample=False, pad_token_id=0, **options
    )[0, len(tokens) :].tolist()
    return output[: output.index(0)] if 0 in output else output


def logits_of_transformers(folder: Path, tokens: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = reference_model(folder)(torch.tensor([tokens])).logits[0].double()
    return logits


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({"repetition_penalty": 1.4}, {"repetition_penalty": 1.4}),
        ({"repetition_penalty": 0.8}, {"repetition_penalty": 0.8}),
        ({"logit_bias": {5: 3.0, 9: -20.0}}, {"sequence_bias": [[[5], 3.0], [[9], -20.0]]}),
        ({"banned_token_ids": tuple(range(1, 150))}, {"suppress_tokens": list(range(1, 150))}),
        ({"allowed_token_ids": tuple(range(40, 60))}, {"suppress_tokens": [*range(40), *range(60, 320)]}),
        ({"min_tokens": 12, "logit_bias": {0: 9.0}}, {"min_new_tokens": 12, "sequence_bias": [[[0], 9.0]]}),
    ],
)
async def test_greedy_text_is_that_of_transformers(folder: Path, ours: Any, theirs: Any) -> None:
    async with running(folder) as harness:
        prompts = [prompt(length, seed=length) for length in (1, 17, 40)]
        outputs = await asyncio.gather(*(harness.generate(tokens, max_tokens=24, **ours) for tokens in prompts))
    for tokens, output in zip(prompts, outputs, strict=True):
        assert list(output.tokens[0]) == generated_by_transformers(folder, tokens, max_new_tokens=24, **theirs)


async def test_seeded_text_is_the_same_alone_in_a_full_batch_and_when_preempted(folder: Path) -> None:
    tokens = prompt(30, seed=1)
    async with running(folder) as harness:
        alone = await harness.generate(tokens, seed=5, n=2, **DRAWN)
    async with running(folder, blocks=24, running_max=32) as harness:  # With so few blocks, requests are preempted.
        dice = random.Random(2)
        others = [
            harness.generate(prompt(dice.randrange(1, 60), seed=seed), seed=seed, **{**DRAWN, "max_tokens": 40})
            for seed in range(12)
        ]
        together, *rest = await asyncio.gather(harness.generate(tokens, seed=5, n=2, **DRAWN), *others)
        assert harness.engine.scheduler.roster.preemption_count > 0
    assert together.tokens == alone.tokens
    assert together.tokens[0] != together.tokens[1]
    assert all(len(output.tokens[0]) >= 20 for output in rest)


async def test_samples_that_have_not_begun_share_the_tokens_of_their_prompt(folder: Path) -> None:
    async with running(folder) as harness:
        request = harness.submit(prompt(20), n=4, **DRAWN)
        first, *others = [sample.tokens for sample in request.samples]
        assert {id(tokens) for tokens in others} == {id(others[0])}, "64 of a long prompt wait in the queue"
        assert first is not others[0]
        await harness.collect(request)
        assert len({id(sample.tokens) for sample in request.samples}) == 4


async def test_counts_and_random_numbers_outlive_the_allocator(folder: Path) -> None:
    tokens, sampling = prompt(30, seed=1), {**DRAWN, "max_tokens": 90, "min_tokens": 80, "seed": 3}
    async with running(folder, ahead_tokens=0) as harness:
        undisturbed = await harness.generate(tokens, **sampling)
        request = harness.submit(tokens, **sampling)
        task = asyncio.create_task(harness.collect(request))
        while request.usage.output_token_count < 10:
            await asyncio.sleep(0)
        await harness.replace_allocator()
        assert (await task).tokens == undisturbed.tokens


@pytest.mark.parametrize("batch_tokens", [16, 64])
async def test_logprobs_of_prompt_and_text_are_those_of_transformers(folder: Path, batch_tokens: int) -> None:
    tokens, ignoring = prompt(70, seed=3), {"max_tokens": 9, "ignore_eos": True}
    async with running(folder, batch_tokens=batch_tokens) as harness:
        # This request caches the prompt. The next request must compute the prompt's tokens again, because it asks for
        # their logprobs.
        await harness.generate(tokens, **ignoring)
        options = {
            "logprobs": 3,
            "prompt_logprobs": 2,
            "repetition_penalty": 1.3,
            "n": 2,
            "temperature": 1.0,
            "seed": 1,
        }
        output, plain = await asyncio.gather(
            harness.generate(tokens, **ignoring, **options), harness.generate(tokens, **ignoring)
        )
        assert output.request.usage.cached_token_count == 0
        again = await harness.generate(tokens, **ignoring)
        assert again.request.usage.cached_token_count == 64
    assert not plain.prompt_logprobs
    assert not plain.logprobs[0]
    for sample in range(2):
        text = list(output.tokens[sample])
        exact = logits_of_transformers(folder, tokens + text).log_softmax(dim=-1)
        found = [*output.prompt_logprobs, *output.logprobs[sample]]
        assert [each.token_id for each in found] == (tokens + text)[1:]
        for position, each in enumerate(found):
            assert each.logprob == pytest.approx(exact[position, each.token_id].item(), abs=2e-4)
            count = 2 if position < len(tokens) - 1 else 3
            assert each.top_logprobs == pytest.approx(exact[position].topk(count).values.tolist(), abs=2e-4)
            assert [exact[position, token].item() for token in each.top_token_ids] == pytest.approx(
                each.top_logprobs, abs=2e-4
            )


async def test_best_of_answers_with_the_likeliest_samples_in_order(folder: Path) -> None:
    options: dict[str, Any] = {"max_tokens": 12, "temperature": 1.5, "seed": 8, "ignore_eos": True}
    async with running(folder) as harness:
        every = await harness.generate(prompt(20), n=6, logprobs=0, **options)
        best = await harness.generate(prompt(20), n=2, best_of=6, **options)
        assert best.request.usage.output_token_count == 6 * 12
    means = [sum(each.logprob for each in logprobs) / len(logprobs) for logprobs in every.logprobs]
    order = sorted(range(6), key=lambda index: -means[index])
    assert best.tokens == [every.tokens[index] for index in order[:2]]
    assert best.texts == [every.texts[index] for index in order[:2]]
    assert best.logprobs == [(), ()]


async def test_a_stop_text_ends_the_text_where_transformers_ends_it() -> None:
    from transformers import AutoTokenizer

    wrapped = AutoTokenizer.from_pretrained(DEMO)
    async with running(DEMO) as harness:
        tokenizer = harness.engine.tokenizer
        tokens = tokenizer.encode("The for statement")
        whole = await harness.generate(tokens, max_tokens=60)
        stops = [whole.texts[0][30:37], whole.texts[0][20:29], "never there"]
        output = await harness.generate(tokens, max_tokens=60, stop=stops, echo_text="The for statement")
    theirs = (
        reference_model(DEMO)
        .generate(
            torch.tensor([tokens]),
            do_sample=False,
            max_new_tokens=60,
            stop_strings=stops,
            tokenizer=wrapped,
            pad_token_id=0,
        )[0, len(tokens) :]
        .tolist()
    )
    assert any(stop in whole.texts[0] for stop in stops)
    assert output.reasons == [FinishReason.STOP]
    assert list(output.tokens[0]) == theirs
    end = min(whole.texts[0].index(stop) for stop in stops if stop in whole.texts[0])
    assert output.texts[0] == "The for statement" + whole.texts[0][:end]


async def test_a_request_without_a_token_to_choose_fails_alone(folder: Path) -> None:
    async with running(folder) as harness:
        company = asyncio.create_task(harness.generate(prompt(20), max_tokens=20, ignore_eos=True))
        with pytest.raises(QuireError, match="no token can be sampled") as raised:
            await harness.generate(prompt(9), allowed_token_ids=(3,), banned_token_ids=(3,))
        assert raised.value.reason is Reason.BAD_PARAMETER
        alone: Output = await harness.generate(prompt(20), max_tokens=20, ignore_eos=True)
        assert (await company).tokens == alone.tokens
        assert await harness.free_block_count() == 512


async def test_a_pass_of_simple_requests_is_waited_for_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts reads of tensors: on a GPU each read waits for the device. Their number is the same on a CPU."""
    monkeypatch.setattr(CpuPagedAttention, "look", lambda *_: None)
    reads: list[str] = []
    to_list = torch.Tensor.tolist

    def counted(tensor: torch.Tensor) -> Any:
        name = sys._getframe(1).f_globals["__name__"]
        if name.startswith(("quire_worker.sampling", "quire_worker.execution", "quire_worker.attention.torch_path")):
            reads.append(name)
        return to_list(tensor)

    async with running(folder, ahead_tokens=64) as harness:
        await harness.generate(prompt(9), max_tokens=2)
        passes = 0
        compute = harness.engine._runner.compute

        def count_passes(*given: Any) -> Any:
            nonlocal passes
            passes += 1
            return compute(*given)

        monkeypatch.setattr(harness.engine._runner, "compute", count_passes)
        monkeypatch.setattr(torch.Tensor, "tolist", counted)
        await asyncio.gather(
            harness.generate(prompt(150, seed=1), max_tokens=20, ignore_eos=True),  # The prompt takes three chunks.
            harness.generate(prompt(5, seed=2), max_tokens=20, ignore_eos=True, temperature=0.8, top_k=9, n=2),
        )
        monkeypatch.undo()
    assert passes >= 20
    assert len(reads) == passes
