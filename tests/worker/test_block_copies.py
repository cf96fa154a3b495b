"""Copy-on-write's copies on a CPU; the kernel has its own tests, and is compared with this in `test_triton_path.py`."""

from __future__ import annotations

import pytest
import torch
from quire_worker.attention import TorchPagedAttention


def filled_layers() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(6, 2, 8, 2, 4, generator=generator) for _ in range(3)]


@pytest.mark.parametrize(
    ("sources", "destinations", "blocks"),
    [
        ([0, 4, 0], [1, 3, 5], [0, 0, 2, 4, 4, 0]),
        ([0, 1, 2], [1, 2, 0], [2, 0, 1, 3, 4, 5]),  # all are read before any is written
        ([], [], [0, 1, 2, 3, 4, 5]),
    ],
)
def test_copied_blocks_equal_their_sources_in_every_layer_and_nothing_else_changes(
    sources: list[int], destinations: list[int], blocks: list[int]
) -> None:
    layers = filled_layers()
    TorchPagedAttention().copy_blocks(layers, sources, destinations)
    assert all(torch.equal(pages, old[blocks]) for pages, old in zip(layers, filled_layers(), strict=True))


@pytest.mark.parametrize(
    ("sources", "destinations", "message"),
    [([0], [1, 2], "2 for 1 sources"), ([0, 1], [2, 2], "twice"), ([0], [6], "outside"), ([-1], [0], "outside")],
)
def test_copies_that_make_no_sense_are_refused(sources: list[int], destinations: list[int], message: str) -> None:
    layers = filled_layers()
    with pytest.raises(ValueError, match=message):
        TorchPagedAttention().copy_blocks(layers, sources, destinations)
    assert all(torch.equal(pages, old) for pages, old in zip(layers, filled_layers(), strict=True))
