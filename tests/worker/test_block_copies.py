"""The copies of copy-on-write, by every implementation; the kernel also has tests of its own."""

from __future__ import annotations

import random

import pytest
import torch
from quire_worker.attention import PagedAttention

from tests.worker.attention_batches import device_of


def filled_layers(attention: PagedAttention, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    layers = [torch.randn(6, 2, 8, 2, 4, generator=generator) for _ in range(3)]
    return [pages.to(device_of(attention), dtype) for pages in layers]


@pytest.mark.parametrize(
    ("sources", "destinations", "blocks"),
    [
        ([0, 4, 0], [1, 3, 5], [0, 0, 2, 4, 4, 0]),
        ([0, 1, 2], [1, 2, 0], [2, 0, 1, 3, 4, 5]),  # a cycle: all sources must be read before any block is written
        ([], [], [0, 1, 2, 3, 4, 5]),
    ],
)
def test_copied_blocks_equal_their_sources_in_every_layer_and_nothing_else_changes(
    sources: list[int], destinations: list[int], blocks: list[int], attention: PagedAttention
) -> None:
    layers = filled_layers(attention)
    attention.copy_blocks(layers, sources, destinations)
    assert all(torch.equal(pages, old[blocks]) for pages, old in zip(layers, filled_layers(attention), strict=True))


@pytest.mark.parametrize(
    ("sources", "destinations", "message"),
    [
        ([0], [1, 2], "must have 1 blocks, like sources, not 2"),
        ([0, 1], [2, 2], "twice"),
        ([0], [6], "outside"),
        ([-1], [0], "outside"),
    ],
)
def test_copies_that_make_no_sense_are_refused(
    sources: list[int], destinations: list[int], message: str, attention: PagedAttention
) -> None:
    layers = filled_layers(attention)
    with pytest.raises(ValueError, match=message):
        attention.copy_blocks(layers, sources, destinations)
    assert all(torch.equal(pages, old) for pages, old in zip(layers, filled_layers(attention), strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_random_copies_read_everything_before_they_write(dtype: torch.dtype, attention: PagedAttention) -> None:
    dice, layers = random.Random(1), filled_layers(attention, dtype)
    for _ in range(5):
        destinations = dice.sample(range(6), dice.randrange(7))
        sources = [dice.randrange(6) for _ in destinations]
        expected = [pages.clone() for pages in layers]
        for pages, old in zip(expected, layers, strict=True):
            pages[destinations] = old[sources]
        attention.copy_blocks(layers, sources, destinations)
        assert all(torch.equal(*both) for both in zip(layers, expected, strict=True))
