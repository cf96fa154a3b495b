"""Requests that arrive at random times, with the lengths of a trace. This module imports nothing of Quire."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

PROMPT_SCALE, OUTPUT_SCALE = 64, 8  # divisors of lengths: the trace has prompts of 126,000 tokens; 4,096 fit the model
OUTPUT_TOKENS_MIN = 2  # The time per further token needs a second token.


class Arrival(NamedTuple):
    """One request: its arrival in seconds after the first, its prompt, and the number of its output tokens."""

    at_s: float
    prompt: list[int]
    output_tokens: int


class Outcome(NamedTuple):
    """The times of a request, in seconds after its arrival; None if the request was refused."""

    first_token_s: float | None
    last_token_s: float | None
    token_count: int


def lengths_of(trace: Path) -> list[tuple[int, int]]:
    """Returns the lengths of prompts and outputs in a trace, scaled down to at least 1 and 2 tokens."""
    rows = map(json.loads, trace.read_text(encoding="utf-8").splitlines())
    return [
        (
            max(1, row["input_length"] // PROMPT_SCALE),
            max(OUTPUT_TOKENS_MIN, row["output_length"] // OUTPUT_SCALE),
        )
        for row in rows
    ]


def draw(lengths: Sequence[tuple[int, int]], *, rate: float, count: int, vocabulary: int, seed: str) -> list[Arrival]:
    """Draws Poisson arrivals: exponential gaps, lengths from the trace, and prompts that never repeat."""
    dice = random.Random(seed)
    arrivals, at_s = [], 0.0
    for _ in range(count):
        prompt_tokens, output_tokens = dice.choice(lengths)
        prompt = [dice.randrange(1, vocabulary) for _ in range(prompt_tokens)]
        arrivals.append(Arrival(at_s, prompt, output_tokens))
        at_s += dice.expovariate(rate) if rate else 0.0
    return arrivals
