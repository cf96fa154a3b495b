"""The computed texts: a prompt, and its continuations level by level."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

VOCABULARY = 2_000  # a little less than the vocabulary of every model here


@dataclass(frozen=True, slots=True)
class Workload:
    """A tree of texts that continue one prompt.

    Attributes:
        name: the name of the workload.
        prompt_tokens: tokens of the prompt.
        width: texts that continue each text of the level above.
        depth: number of levels.
        step_tokens: tokens of each text.
        is_scored: whether the texts are given and scored, instead of generated.
        is_searched: whether the texts are the beams of one search.
    """

    name: str
    prompt_tokens: int
    width: int
    depth: int
    step_tokens: int
    is_scored: bool = False
    is_searched: bool = False

    @property
    def text_count(self) -> int:
        """Counts the texts of all levels."""
        return sum(self.width ** (level + 1) for level in range(self.depth))

    @property
    def token_count(self) -> int:
        """Counts the tokens of all texts."""
        return self.text_count * self.step_tokens

    def prompt(self, round_number: int) -> list[int]:
        """Returns the prompt of a round; every round has another one."""
        return _tokens(f"prompt {self.name} {round_number}", self.prompt_tokens)

    def candidates(self, round_number: int) -> list[list[int]]:
        """Returns the texts to score in a round."""
        return [_tokens(f"{self.name} {round_number} {number}", self.step_tokens) for number in range(self.width)]

    def levels(self, round_number: int) -> Iterator[list[dict[str, Any]]]:
        """Yields each level as independent requests: `prompt` and `output_tokens`."""
        prompt = self.prompt(round_number)
        if self.is_scored:
            yield [{"prompt": prompt + text, "output_tokens": 1} for text in self.candidates(round_number)]
            return
        if self.is_searched:
            yield [{"prompt": prompt, "output_tokens": self.step_tokens, "num_beams": self.width}]
            return
        paths: list[list[int]] = [[]]
        for level in range(self.depth):
            paths = [path for path in paths for _ in range(self.width)]
            yield [{"prompt": prompt + path, "output_tokens": self.step_tokens} for path in paths]
            paths = [
                path + _tokens(f"{self.name} {round_number} {level} {number}", self.step_tokens)
                for number, path in enumerate(paths)
            ]


def minimum_blocks(workload: Workload, block_tokens: int) -> int:
    """Returns the minimum of blocks for the prompt and all texts, when all branches exist.

    All tokens of a branch except its last are in pages. The pages of its continuations also have that last token. All
    texts with the same tokens up to a block's end share it. A partly filled block is no longer shared after both
    branches have written to it: if a branch ends at a block's end, its own last block is a token short of the block
    that its forks share.
    """
    held = -(-(workload.prompt_tokens - 1) // block_tokens)
    if workload.is_scored:  # Candidates' forks are freed with the answer, so only the prompt's blocks remain.
        return held
    length = workload.prompt_tokens
    for level in range(workload.depth):
        full = length // block_tokens  # full blocks of the parent, which its forks share
        held += workload.width**level * (full - (length - 1) // block_tokens)
        length += workload.step_tokens
        held += workload.width ** (level + 1) * (-(-(length - 1) // block_tokens) - full)
    return held


def distinct_blocks(texts: Sequence[Sequence[int]], block_tokens: int) -> int:
    """Returns the minimum of blocks that hold all texts without their last tokens. Texts that are equal up to a block's
    end share it."""
    return len(
        {
            (first, *text[: min(first + block_tokens, len(text) - 1)])
            for text in texts
            for first in range(0, len(text) - 1, block_tokens)
        }
    )


def _tokens(seed: str, count: int) -> list[int]:
    dice = random.Random(seed)
    return [dice.randrange(1, VOCABULARY) for _ in range(count)]


def _named(name: str, prompt_tokens: int, **shape: Any) -> Workload:
    return Workload(name, prompt_tokens, **shape)


WORKLOADS: dict[str, Callable[[int], Workload]] = {
    name: partial(_named, name, **shape)
    for name, shape in {
        "best of 16": {"width": 16, "depth": 1, "step_tokens": 64},
        "tree of 4 x 4 x 4": {"width": 4, "depth": 3, "step_tokens": 16},
        "beam 8": {"width": 8, "depth": 1, "step_tokens": 64, "is_searched": True},
        "64 candidates": {"width": 64, "depth": 1, "step_tokens": 8, "is_scored": True},
    }.items()
}
