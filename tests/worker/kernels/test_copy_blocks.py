"""Copies of blocks compared with plain torch; pairs form chains, branches and cycles."""

from __future__ import annotations

import random
from types import ModuleType

import pytest
import torch
from quire_kernels.ops import copy_blocks as real
from quire_kernels.ops.copy_blocks import copy_blocks, copy_blocks_reference, plan_chains
from quire_kernels.shared.block_buffers import describe_buffers

PAIRS = {
    "one": [(0, 1)],
    "one source, many destinations": [(0, 1), (0, 2), (0, 3)],
    "a chain": [(0, 1), (1, 2), (2, 3)],
    "a chain, given backwards": [(2, 3), (1, 2), (0, 1)],
    "two blocks change places": [(1, 0), (0, 1)],
    "a circle of three, and who reads it": [(0, 1), (1, 2), (2, 0), (1, 5), (5, 6)],
    "two circles and a pair of their own": [(0, 1), (1, 0), (2, 3), (3, 2), (4, 5)],
    "a block onto itself": [(4, 4), (4, 5)],
    "nothing": [],
}


def make_buffers(device: torch.device) -> list[torch.Tensor]:
    """Makes buffers with blocks of 60 bytes (copied in words of 4 bytes) and of 16,400 bytes (several chunks)."""
    return [torch.randn(8, 2, 3, 5, device=device).half(), torch.randn(8, 4100, device=device)]


def copies_match(module: ModuleType, pairs: list[tuple[int, int]], device: torch.device) -> bool:
    """Returns whether kernel and reference leave the same buffers. The module may be the real or a faulty one."""
    buffers = make_buffers(device)
    expected = [buffer.clone() for buffer in buffers]
    sources, destinations = [s for s, _ in pairs], [d for _, d in pairs]
    module.copy_blocks(buffers, sources, destinations)
    copy_blocks_reference(expected, sources, destinations)
    return all(torch.equal(*both) for both in zip(buffers, expected, strict=True))


@pytest.mark.parametrize("pairs", PAIRS.values(), ids=PAIRS.keys())
def test_all_sources_are_read_before_any_destination_is_written(
    pairs: list[tuple[int, int]], device: torch.device
) -> None:
    assert copies_match(real, pairs, device)


@pytest.mark.parametrize("seed", range(8))
def test_random_pairs(seed: int, device: torch.device) -> None:
    rng = random.Random(seed)
    destinations = rng.sample(range(8), rng.randint(1, 8))
    assert copies_match(real, [(rng.randrange(8), destination) for destination in destinations], device)


@pytest.mark.parametrize("seed", range(20))
def test_a_plan_never_reads_a_block_after_its_overwriting_and_its_chains_are_independent(seed: int) -> None:
    rng = random.Random(seed)
    count = rng.choice([3, 10, 60])
    destinations = rng.sample(range(count), rng.randint(1, count))
    sources = [rng.randrange(count) for _ in destinations]
    chains = plan_chains(sources, destinations)
    writer_of = {d: number for number, chain in enumerate(chains) for _, d in chain.steps}
    planned = {}
    for number, chain in enumerate(chains):
        written: set[int] = set()
        for source, destination in chain.steps:
            origin = chain.held if source is None else source
            assert origin is not None
            assert source not in written
            assert writer_of.get(origin, number) == number
            written.add(destination)
            planned[destination] = origin
    assert planned == {d: s for s, d in zip(sources, destinations, strict=True) if s != d}


def test_pairs_that_do_not_touch_are_chains_of_one() -> None:
    assert len(plan_chains(range(0, 1000, 2), range(1, 1000, 2))) == 500
    assert len(plan_chains([0] * 9, range(1, 10))) == 9


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("width", [1, 3, 8, 2100])
def test_blocks_of_any_size_and_dtype(dtype: torch.dtype, width: int, device: torch.device) -> None:
    buffer = torch.randint(0, 100, (4, width), device=device).to(dtype)
    expected = buffer.clone()
    copy_blocks([buffer], [3, 0], [0, 3])
    copy_blocks_reference([expected], [3, 0], [0, 3])
    assert torch.equal(buffer, expected)


def test_blocks_may_lie_apart_and_a_buffer_may_start_anywhere(device: torch.device) -> None:
    memory = torch.arange(400, dtype=torch.int16, device=device)
    buffer = memory[7:].as_strided((5, 6, 4), (50, 4, 1), 7)
    expected = memory.clone()
    expected[7 + 150 : 7 + 150 + 24] = memory[7 : 7 + 24]
    copy_blocks([buffer], [0], [3])
    assert torch.equal(memory, expected)


def test_blocks_further_than_an_int32_reaches_are_copied(device: torch.device) -> None:
    stride = 2**31 + 64
    # On a CPU, the system allocates only the memory that is written.
    memory = torch.empty(stride + 4096, dtype=torch.uint8, device=device)
    buffer = memory.as_strided((2, 4096), (stride, 1))
    buffer[0] = torch.arange(4096, device=device) % 251
    copy_blocks([buffer], [0], [1])
    assert torch.equal(buffer[0], buffer[1])


def test_the_table_of_buffers_can_be_made_once(device: torch.device) -> None:
    buffers = make_buffers(device)
    copy_blocks(describe_buffers(buffers), [0], [1])
    assert torch.equal(buffers[1][0], buffers[1][1])


@pytest.mark.parametrize(
    ("sources", "destinations", "message"),
    [
        ([0, 1], [2], "destinations must have 2 blocks, like sources, not 1"),
        ([0, 1], [2, 2], "destinations: a block occurs twice"),
        ([8], [0], "sources: block 8"),
        ([0], [-1], "destinations: block -1"),
    ],
)
def test_bad_pairs_are_refused(sources: list[int], destinations: list[int], message: str, device: torch.device) -> None:
    with pytest.raises(ValueError, match=message):
        copy_blocks(make_buffers(device), sources, destinations)


def test_bad_buffers_are_refused(device: torch.device) -> None:
    square = torch.zeros(4, 4, 4, device=device)
    overlapping = square[0, :1].expand(4, 4)
    for buffers in ([], [square[:0]], [square[0, 0]], [square.transpose(1, 2)], [overlapping]):
        with pytest.raises(ValueError, match="buffers"):
            copy_blocks(buffers, [0], [1])
