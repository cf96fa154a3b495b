"""Copies whole blocks in all layers in one launch, for copy-on-write.

    for every buffer:  buffer[destinations[i]] = old buffer[sources[i]]

"Old" means that the result is as if all reads preceded all writes. So a block may be the source of one pair and the
destination of another. Bytes are copied to the same offset of another block, so no program waits for a whole block.
Pairs with a common block form a chain. One program runs the whole chain for its chunk of bytes, in an order that reads
every block before overwriting it. A pair without a common block is a chain of its own. A cycle (a -> b, b -> a) has no
such order. The cycle's program first loads one block's chunk into registers, and stores this chunk at the end.

    a -> b, b -> c            c = b;  b = a
    a -> b, b -> c, c -> a    hold = a;  a = c;  c = b;  b = hold
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
import triton
import triton.language as tl

from quire_kernels.shared.block_buffers import (
    NUM_WARPS,
    Buffers,
    check_blocks,
    describe_buffers,
    upload,
    word_constexprs,
    words_at,
)


@triton.jit(do_not_specialize=["chain_count", "buffer_count", "chunk_count"])
def copy_blocks_kernel(
    table_ptr,
    chain_count,
    buffer_count,
    chunk_count,
    WORD: tl.constexpr,
    WORD_BYTES: tl.constexpr,
    CHUNK_WORDS: tl.constexpr,
):
    """Runs one chain for one chunk of its blocks in one buffer; chunk is the innermost index, chain the outermost."""
    # The table has four parts: [buffers, 3] fields of buffers; [chains] held blocks; [chains + 1] indptr; [steps, 2]
    # source and destination.
    program = tl.program_id(0)
    chunk = program % chunk_count
    buffer = (program // chunk_count) % buffer_count
    chain = program // chunk_count // buffer_count
    base = tl.load(table_ptr + buffer * 3)
    stride = tl.load(table_ptr + buffer * 3 + 1)
    size = tl.load(table_ptr + buffer * 3 + 2)
    held_ptr = table_ptr + buffer_count * 3
    indptr_ptr = held_ptr + chain_count
    steps_ptr = indptr_ptr + chain_count + 1
    word = chunk * CHUNK_WORDS + tl.arange(0, CHUNK_WORDS)
    mask = word < size // WORD_BYTES

    held_block = tl.load(held_ptr + chain)
    held = tl.load(
        words_at(base + tl.maximum(held_block, 0) * stride, WORD) + word,
        mask=mask & (held_block >= 0),
        other=0,
    )
    step = tl.load(indptr_ptr + chain)
    end = tl.load(indptr_ptr + chain + 1)
    while step < end:
        source = tl.load(steps_ptr + step * 2)
        destination = tl.load(steps_ptr + step * 2 + 1)
        data = tl.load(
            words_at(base + tl.maximum(source, 0) * stride, WORD) + word,
            mask=mask & (source >= 0),
            other=0,
        )
        data = tl.where(source >= 0, data, held)
        # Another thread of the program may still be reading the words that this thread is about to overwrite.
        tl.debug_barrier()
        tl.store(words_at(base + destination * stride, WORD) + word, data, mask=mask)
        step += 1


def copy_blocks(buffers: Buffers, sources: Sequence[int], destinations: Sequence[int]) -> None:
    """Copies blocks, in every buffer and in place, as if all sources were read before any destination is written.

    Makes one upload and one launch on the current stream, and does not wait for the device. CUDA graphs cannot capture
    it, because the host reads the pairs.

    Args:
        buffers: each `[blocks, ...]` of any dtype, all on one device; a block is contiguous; there may be gaps between
            blocks. Or the result of `describe_buffers`, which saves checking each tensor again.
        sources: block ids.
        destinations: as many block ids, each at most once.

    Raises:
        ValueError: the lengths differ, a destination is repeated, an id is outside the pool, or `buffers` are not as
            described.
    """
    table = describe_buffers(buffers)
    if len(sources) != len(destinations):
        raise ValueError(f"destinations must have {len(sources)} blocks, like sources, not {len(destinations)}")
    check_blocks("sources", sources, table.block_count, unique=False)
    check_blocks("destinations", destinations, table.block_count, unique=True)
    chains = plan_chains(sources, destinations)
    if not chains:
        return
    steps = [block for chain in chains for step in chain.steps for block in step]
    numbers = [
        *table.fields,
        *_encoded(chain.held for chain in chains),
        *accumulate((len(chain.steps) for chain in chains), initial=0),
        *_encoded(steps),
    ]
    word_bytes = table.word_bytes()
    with table.current(copy_blocks_kernel):
        copy_blocks_kernel[(len(chains) * table.buffer_count * table.chunk_count(word_bytes),)](
            upload(numbers, table.device),
            len(chains),
            table.buffer_count,
            table.chunk_count(word_bytes),
            **word_constexprs(word_bytes),
            num_warps=NUM_WARPS,
        )


def _encoded(blocks: Iterable[int | None]) -> list[int]:
    """Encodes blocks for the kernel's table. -1 stands for None: nothing is held, or the source is the held bytes."""
    return [-1 if block is None else block for block in blocks]


@dataclass(frozen=True, slots=True)
class CopyChain:
    """A sequence of copies that must run in this order."""

    held: int | None  # a block to load into registers before the first step
    steps: tuple[tuple[int | None, int], ...]  # (source, destination); source None: the held bytes


def plan_chains(sources: Sequence[int], destinations: Sequence[int]) -> list[CopyChain]:
    """Orders copies so that each block is read before it is overwritten.

    Every destination is written once. So a destination can be written as soon as no remaining pair reads it. When every
    destination is still read, the remaining pairs are cycles, and each of their blocks is read once.

    Args:
        sources: block ids.
        destinations: as many block ids, without repetition.

    Returns:
        Chains that share no block except sources that are never written. A copy of a block to itself is omitted.
    """
    source_of = {d: s for s, d in zip(sources, destinations, strict=True) if s != d}
    chain_of = _components(source_of)
    reads = dict.fromkeys(source_of, 0)
    for source in source_of.values():
        if source in reads:
            reads[source] += 1
    steps: dict[int, list[tuple[int | None, int]]] = defaultdict(list)
    held: dict[int, int] = {}
    ready = [destination for destination, count in reads.items() if count == 0]
    waiting = dict.fromkeys(source_of)  # used as an ordered set
    while ready:
        destination = ready.pop()
        del waiting[destination]
        source = source_of[destination]
        steps[chain_of[destination]].append((source, destination))
        if source in reads:
            reads[source] -= 1
            if reads[source] == 0:
                ready.append(source)
    while waiting:
        first = destination = next(iter(waiting))
        chain = chain_of[first]
        held[chain] = first
        while True:
            del waiting[destination]
            source = source_of[destination]
            steps[chain].append((None if source == first else source, destination))
            if source == first:
                break
            destination = source
    return [CopyChain(held.get(chain), tuple(chain_steps)) for chain, chain_steps in steps.items()]


def copy_blocks_reference(buffers: Sequence[torch.Tensor], sources: Sequence[int], destinations: Sequence[int]) -> None:
    """Copies blocks in plain torch."""
    for buffer in buffers:
        old = buffer.clone()
        for source, destination in zip(sources, destinations, strict=True):
            buffer[destination].view(torch.uint8).copy_(old[source].view(torch.uint8))


def _components(source_of: dict[int, int]) -> dict[int, int]:
    """Returns the chain number of each destination: its source's number if the source is a destination too."""
    chain_of: dict[int, int] = {}
    for destination in source_of:
        path = []
        block = destination
        while block in source_of and block not in chain_of:
            chain_of[block] = destination
            path.append(block)
            block = source_of[block]
        for member in path:
            chain_of[member] = chain_of.get(block, destination)
    return chain_of
