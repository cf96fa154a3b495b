"""Requests with options that drafts could break, and the comparison of their results with and without drafts."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any

import pytest

from tests.worker.engine_harness import Harness, Output, prompt

# These options cover everything that a token can depend on: earlier tokens, random numbers, the number of tokens.
OPTIONS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.4, "seed": 3},
    {"temperature": 0.3, "seed": 4, "repetition_penalty": 1.05, "frequency_penalty": 0.1, "min_p": 0.02},
    {"temperature": 0.5, "seed": 5, "n": 3, "top_p": 0.9},
    {"logprobs": 2, "logit_bias": {7: 0.5}},
    {"n": 2, "best_of": 3, "temperature": 0.4, "seed": 6},
    {"prompt_logprobs": 1, "min_tokens": 3},
]


def repetitive(dice: random.Random) -> list[int]:
    """Returns a prompt with repetitions, as in code and tables."""
    piece = prompt(dice.randrange(3, 12), seed=dice.randrange(1000))
    return (piece * 8)[: dice.randrange(20, 60)]


async def texts_of(harness: Harness, *, max_tokens: int = 40) -> list[Output]:
    dice = random.Random(1)
    prompts = [repetitive(dice) for _ in OPTIONS]
    return await asyncio.gather(
        *(
            harness.generate(tokens, max_tokens=max_tokens, ignore_eos=index % 2 == 0, **options)
            for index, (tokens, options) in enumerate(zip(prompts, OPTIONS, strict=True))
        )
    )


def check_same(drafted: Sequence[Output], plain: Sequence[Output]) -> None:
    """Checks that texts, finish reasons and logprobs are equal with and without drafts."""
    for without, with_drafts in zip(plain, drafted, strict=True):
        assert with_drafts.tokens == without.tokens
        assert with_drafts.texts == without.texts
        assert with_drafts.reasons == without.reasons
        for ours, theirs in zip(with_drafts.logprobs, without.logprobs, strict=True):
            assert [each.logprob for each in ours] == pytest.approx([each.logprob for each in theirs], abs=1e-4)
