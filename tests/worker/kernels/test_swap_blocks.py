"""Blocks are gathered into one buffer, and scattered back."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from quire_kernels.ops import swap_blocks as real
from quire_kernels.ops.swap_blocks import gather_blocks, gather_blocks_reference, scatter_blocks


def make_buffers(device: torch.device) -> list[torch.Tensor]:
    """Makes buffers with blocks of 60, 16,400 and 24 bytes."""
    return [
        torch.randn(6, 2, 3, 5, device=device).half(),
        torch.randn(6, 4100, device=device),
        torch.randint(0, 9, (8, 3), device=device),
    ]


def make_staging(buffers: list[torch.Tensor], rows: int) -> torch.Tensor:
    row_bytes = sum(buffer[0].numel() * buffer.element_size() for buffer in buffers)
    return torch.zeros(rows, row_bytes, dtype=torch.uint8, device=buffers[0].device)


def swap_matches(module: ModuleType, device: torch.device) -> bool:
    """Returns whether gathering equals the reference, and scattering into other blocks restores the contents.

    The module may be the real or a faulty one.
    """
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
    with pytest.raises(ValueError, match="blocks: a block occurs twice"):
        scatter_blocks(staging, buffers, [3, 3])


def test_nan_of_any_kind_is_moved_bit_by_bit_and_nothing_else_is_touched(device: torch.device) -> None:
    patterns = torch.arange(0x7F80_0001, 0x7F80_0001 + 6 * 40, device=device).view(6, 40).to(torch.int32)
    buffer = patterns.view(torch.float32)
    assert buffer.isnan().all()
    staging = torch.full((3, 160), 7, dtype=torch.uint8, device=device)
    gather_blocks([buffer], [4, 1], staging)
    assert torch.equal(staging[:2].view(torch.int32), patterns[[4, 1]])
    assert staging[2].eq(7).all()
    target = buffer.clone()
    scatter_blocks(staging, [target], [0, 5])
    assert torch.equal(target.view(torch.int32), patterns[[4, 1, 2, 3, 4, 1]])


def test_blocks_further_than_an_int32_reaches_go_out_and_come_back(device: torch.device) -> None:
    stride = 2**31 + 64
    # On a CPU, the system allocates only the memory that is written.
    memory = torch.empty(stride + 4096, dtype=torch.uint8, device=device)
    buffer = memory.as_strided((2, 4096), (stride, 1))
    buffer[1] = torch.arange(4096, device=device) % 251
    staging = torch.zeros(1, 4096, dtype=torch.uint8, device=device)
    gather_blocks([buffer], [1], staging)
    assert torch.equal(staging[0], buffer[1])
    scatter_blocks(255 - staging, [buffer], [1])
    assert torch.equal(buffer[1], 255 - staging[0])


def test_no_blocks_are_no_launch(device: torch.device) -> None:
    buffers = make_buffers(device)
    before = [buffer.clone() for buffer in buffers]
    gather_blocks(buffers, [], make_staging(buffers, 0))
    scatter_blocks(make_staging(buffers, 0), buffers, [])
    assert all(map(torch.equal, buffers, before))


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
