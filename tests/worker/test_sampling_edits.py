"""Biases, penalties, masks and minimum lengths, compared with the logits processors of transformers."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from quire_worker.sampling.masks import apply_masks, pack
from quire_worker.sampling.params import SamplingParams
from quire_worker.sampling.sampler import Sampler, draw
from quire_worker.sampling.token_edits import TokenEdits, apply_edits
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
)

VOCABULARY = 211
EOS = 0
PARAMS = [
    SamplingParams(repetition_penalty=1.7),
    SamplingParams(repetition_penalty=0.6),
    SamplingParams(logit_bias={3: 4.5, 200: -7.0, EOS: 1.0}),
    SamplingParams(banned_token_ids=(1, 2, 210)),
    SamplingParams(min_tokens=6, max_tokens=20, stop_token_ids=(9, 12)),
    SamplingParams(logit_bias={3: 4.5, 40: 2.0}, repetition_penalty=1.3, banned_token_ids=(40, 50), min_tokens=4),
    SamplingParams(),
]


def logits_of(rows: int, *, seed: int) -> torch.Tensor:
    return torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 4


def tokens_of(count: int, *, seed: int) -> list[int]:
    dice = random.Random(seed)
    return [dice.randrange(1, 60) for _ in range(count)]


def processed_by_transformers(
    params: SamplingParams, prompt: list[int], output: list[int], logits: torch.Tensor
) -> torch.Tensor:
    stops = [EOS, *params.stop_token_ids]
    processors: Any = LogitsProcessorList()
    if params.logit_bias:
        processors.append(SequenceBiasLogitsProcessor([[[token], bias] for token, bias in params.logit_bias.items()]))
    if params.repetition_penalty != 1:
        processors.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    if params.banned_token_ids:
        processors.append(NoBadWordsLogitsProcessor([[token] for token in params.banned_token_ids], eos_token_id=[]))
    if params.min_tokens:
        processors.append(MinNewTokensLengthLogitsProcessor(len(prompt), params.min_tokens, stops))
    processed: torch.Tensor = processors(torch.tensor([prompt + output]), logits.clone())
    return processed


def sampler_of(params: SamplingParams, prompt: list[int]) -> Sampler:
    return Sampler.of(params, 0, prompt=prompt, eos_token_ids=[EOS], vocabulary=VOCABULARY)


def edited(samplers: list[Sampler], logits: torch.Tensor) -> torch.Tensor:
    changed = logits.clone()
    apply_edits(changed, [(row, each.edits) for row, each in enumerate(samplers) if each.edits is not None])
    return changed


def test_a_batch_of_edits_is_what_transformers_gives_row_by_row_as_the_text_grows() -> None:
    prompts = [tokens_of(10 + row, seed=row) for row in range(len(PARAMS))]
    samplers = [sampler_of(params, prompt) for params, prompt in zip(PARAMS, prompts, strict=True)]
    outputs: list[list[int]] = [[] for _ in PARAMS]
    for step in range(10):
        logits = logits_of(len(PARAMS), seed=step)
        ours = edited(samplers, logits)
        rows = zip(PARAMS, prompts, outputs, logits, strict=True)
        theirs = torch.cat([processed_by_transformers(*row, row_logits[None]) for *row, row_logits in rows])
        torch.testing.assert_close(ours, theirs)
        for row, sampler in enumerate(samplers):
            outputs[row].append(tokens_of(1, seed=100 * step + row)[0])
            sampler.take(outputs[row][-1])


def test_presence_and_frequency_follow_the_published_formula() -> None:
    """The formula is mu[j] - c[j] * frequency - (c[j] > 0) * presence, without the prompt; transformers has neither."""
    params = SamplingParams(presence_penalty=0.7, frequency_penalty=-0.4)
    prompt, output = tokens_of(30, seed=1), tokens_of(50, seed=2)
    sampler, logits = sampler_of(params, prompt), logits_of(1, seed=3)
    for token in output:
        sampler.take(token)
    counts = torch.bincount(torch.tensor(output), minlength=VOCABULARY).double()
    expected = logits.double() - counts * -0.4 - (counts > 0) * 0.7
    torch.testing.assert_close(edited([sampler], logits).double(), expected, rtol=0, atol=1e-5)


def test_a_copy_counts_for_itself() -> None:
    edits = TokenEdits(SamplingParams(frequency_penalty=1.0), [], [])
    for token in range(40):
        edits.take(token)
    twin = edits.copy()
    twin.take(3)
    twin.take(99)
    ours, theirs = edits.columns(), twin.columns()
    assert (len(ours.token), len(theirs.token)) == (40, 41)
    assert (ours.subtrahend[3], theirs.subtrahend[3]) == (1.0, 2.0)


def test_only_allowed_tokens_are_left_as_in_transformers() -> None:
    dice, logits = random.Random(1), logits_of(6, seed=1)
    allowed = [dice.sample(range(VOCABULARY), count) for count in (1, 5, 32, 33, 200, 211)]
    changed = logits.clone()
    rows = [5, 1, 3]
    words = torch.stack([torch.from_numpy(pack(allowed[row], VOCABULARY)) for row in rows]).numpy()
    apply_masks(changed, rows, words)
    for row in range(6):
        others = sorted({*range(VOCABULARY)} - {*allowed[row]}) if row in rows else []
        suppress: Any = SuppressTokensLogitsProcessor(others)
        assert torch.equal(changed[row : row + 1], suppress(None, logits[row : row + 1]))


@pytest.mark.parametrize("params", PARAMS)
def test_a_row_is_changed_alike_alone_and_in_company_and_the_models_logits_stay(params: SamplingParams) -> None:
    prompt, logits = tokens_of(12, seed=5), logits_of(len(PARAMS) + 1, seed=6)
    before = logits.clone()
    company = [sampler_of(each, tokens_of(9, seed=7)) for each in PARAMS]
    together = draw(logits, [*company, sampler_of(params, prompt)]).tokens[-1]
    assert draw(logits[-1:], [sampler_of(params, prompt)]).tokens == [together]
    assert torch.equal(logits, before)


def test_who_has_no_token_left_gets_none_and_the_others_theirs() -> None:
    nothing = SamplingParams(allowed_token_ids=(3,), banned_token_ids=(3,))
    logits = logits_of(3, seed=1)
    drawn = draw(logits, [sampler_of(each, [1]) for each in (SamplingParams(), nothing, SamplingParams())])
    likeliest = logits.argmax(dim=-1).tolist()
    assert drawn.tokens == [likeliest[0], None, likeliest[2]]


def test_logprobs_are_those_of_the_models_own_logits_in_double_precision() -> None:
    logits = logits_of(4, seed=2)
    params = [
        SamplingParams(logprobs=5, logit_bias={3: 50.0}),
        SamplingParams(),
        SamplingParams(logprobs=0, temperature=2.0, seed=1),
        SamplingParams(logprobs=20, allowed_token_ids=(4, 5)),
    ]
    drawn = draw(logits, [sampler_of(each, [1]) for each in params])
    exact = logits.double().log_softmax(dim=-1)
    assert drawn.tokens[0] == 3
    for row, (each, found) in enumerate(zip(params, drawn.logprobs, strict=True)):
        if each.logprobs is None:
            assert found is None
            continue
        assert found is not None
        assert found.token_id == drawn.tokens[row]
        assert found.logprob == pytest.approx(exact[row, found.token_id].item(), abs=1e-5)
        best = exact[row].topk(each.logprobs)
        assert list(found.top_token_ids) == best.indices.tolist()
        assert found.top_logprobs == pytest.approx(best.values.tolist(), abs=1e-5)


def test_a_plain_row_takes_no_further_work() -> None:
    logits, seen = logits_of(2, seed=1), []

    def choose(rows: torch.Tensor, *_: Any) -> torch.Tensor:
        seen.append(rows)
        return torch.tensor([1, 2])

    draw(logits, [sampler_of(SamplingParams(), [1])] * 2, choose)
    assert seen[0] is logits
