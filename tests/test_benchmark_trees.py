"""The least number of blocks in `trees.py` is the number of distinct blocks."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))

from trees_sides.workload import Workload, distinct_blocks, minimum_blocks


def distinct_naively(workload: Workload, block_tokens: int) -> int:
    """Lists all branches, each with its own tokens, and counts distinct prefixes that end with a block."""
    number = itertools.count()
    level: list[list[int]] = [[next(number) for _ in range(workload.prompt_tokens)]]
    every = list(level)
    for _ in range(workload.depth):
        level = [
            [*parent, *(next(number) for _ in range(workload.step_tokens))]
            for parent in level
            for _ in range(workload.width)
        ]
        every += level
    beginnings = {
        tuple(text[:-1][: first + block_tokens]) for text in every for first in range(0, len(text) - 1, block_tokens)
    }
    return len(beginnings)


@pytest.mark.parametrize("prompt_tokens", [15, 16, 17, 31, 32, 33])
@pytest.mark.parametrize(("width", "depth", "step_tokens"), [(3, 1, 2), (4, 1, 64), (2, 3, 16), (3, 2, 7), (2, 2, 17)])
def test_the_least_that_a_tree_holds_is_each_distinct_block_once(
    prompt_tokens: int, width: int, depth: int, step_tokens: int
) -> None:
    workload = Workload("", prompt_tokens, width, depth, step_tokens)
    assert minimum_blocks(workload, 16) == distinct_naively(workload, 16)


def test_texts_of_a_search_share_what_is_the_same_up_to_a_blocks_end() -> None:
    prompt = list(range(32))
    assert distinct_blocks([[*prompt, 1, 2], [*prompt, 1, 3], [*prompt, 4, 5]], 16) == 2 + 2
