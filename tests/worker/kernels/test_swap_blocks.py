"""Blocks gathered into one buffer and scattered back."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from quire_worker.kernels import swap_blocks as real
from quire_worker.kernels.swap_blocks import gather_blocks, gather_blocks_reference, scatter_blocks


def make_buffers(device: torch.device) -> list[torch.Tensor]:
    """Blocks of 60, of 16,400 and of 24 bytes."""
    return [
        torch.randn(6, 2, 3, 5, device=device).half(),
        torch.randn(6, 4100, device=device),
        torch.randint(0, 9, (8, 3), device=device),
    ]


def make_staging(buffers: list[torch.Tensor], rows: int) -> torch.Tensor:
    row_bytes = sum(buffer[0].numel() * buffer.element_size() for buffer in buffers)
    return torch.zeros(rows, row_bytes, dtype=torch.uint8, device=buffers[0].device)


def swap_matches(module: ModuleType, device: torch.device) -> bool:
    """Out, compared with the reference, and back into other blocks: used on the real module and on faulty ones."""
    buffers = make_buffers(device)
    staging, expected = make_staging(buffers, 4), make_staging(buffers, 4)
    module.gather_blocks(buffers, [5, 0, 2], staging)
    gather_blocks_reference(buffers, [5, 0, 2], expected)
    if not torch.equal(staging, expected):
        return False
    back = [buffer.clone() for buffer in buffers]
    for buffer, copy in zip(buffers, back, strict=True):
        for source, destination in ((5, 1), (0, 0), (2, 4)):
            copy[destination] = buffer[source]
    module.scatter_blocks(staging, buffers, [1, 0, 4])
    return all(torch.equal(*both) for both in zip(buffers, back, strict=True))


def test_blocks_go_out_and_come_back_anywhere(device: torch.device) -> None:
    assert swap_matches(real, device)


def test_a_gathered_block_may_come_twice_but_a_scattered_one_not(device: torch.device) -> None:
    buffers = make_buffers(device)
    staging = make_staging(buffers, 2)
    gather_blocks(buffers, [3, 3], staging)
    assert torch.equal(staging[0], staging[1])
    with pytest.raises(ValueError, match="blocks: a block comes twice"):
        scatter_blocks(staging, buffers, [3, 3])


def test_no_blocks_are_no_launch(device: torch.device) -> None:
    buffers = make_buffers(device)
    gather_blocks(buffers, [], make_staging(buffers, 0))
    scatter_blocks(make_staging(buffers, 0), buffers, [])


@pytest.mark.gpu
def test_pinned_memory_of_the_host_is_read_and_written() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    buffers = make_buffers(torch.device("cuda"))
    staging = torch.zeros(2, make_staging(buffers, 1).shape[1], dtype=torch.uint8, pin_memory=True)
    expected = make_staging(buffers, 2)
    gather_blocks(buffers, [4, 1], staging)
    gather_blocks_reference(buffers, [4, 1], expected)
    torch.cuda.synchronize()
    assert torch.equal(staging, expected.cpu())
    before = [buffer.clone() for buffer in buffers]
    for buffer in buffers:
        buffer.zero_()
    scatter_blocks(staging, buffers, [4, 1])
    assert all(torch.equal(new[[4, 1]], old[[4, 1]]) for new, old in zip(buffers, before, strict=True))


def test_staging_that_does_not_fit_is_refused(device: torch.device) -> None:
    buffers = make_buffers(device)
    staging = make_staging(buffers, 4)
    for bad in (staging[:, :-1], staging[:1], staging.to(torch.int8), staging.t().contiguous().t(), staging[0]):
        with pytest.raises(ValueError, match="staging"):
            gather_blocks(buffers, [0, 1], bad)
    with pytest.raises(ValueError, match="blocks: block 6"):
        gather_blocks(buffers, [6], staging)
