"""Copies whole blocks in all layers in one launch: the copy of copy-on-write.

    for every buffer:  buffer[destinations[i]] = old buffer[sources[i]]

"Old": all reads come before all writes, so a block may be source of one pair and destination of another. Bytes at one
place of a block only ever go to the same place of another, so no program waits for a whole block. Pairs with a common
block become a chain, and one program runs the whole chain for its chunk of bytes, in an order that reads every block
before it is overwritten. Pairs that touch no other are chains of one. Only a cycle (a -> b, b -> a) has no such order:
its program first holds the chunk of one block in registers and ends by storing it.

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
    """A program runs one chain for one chunk of its blocks in one buffer; chunk innermost, then buffer, then chain."""
    # [buffers, 3] of buffers; [chains] held blocks; [chains + 1] indptr; [steps, 2] source and destination
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
        # Another thread of the program may still read the words that this one is about to overwrite.
        tl.debug_barrier()
        tl.store(words_at(base + destination * stride, WORD) + word, data, mask=mask)
        step += 1


def copy_blocks(buffers: Buffers, sources: Sequence[int], destinations: Sequence[int]) -> None:
    """Copies blocks, in every buffer and in place, as if all sources were read before any destination is written.

    One upload and one launch on the current stream; waits for nothing. Not for CUDA graphs: the pairs are arguments
    of the host.

    Args:
        buffers: each `[blocks, ...]` of any dtype, all on one device; a block is contiguous, blocks may lie apart. A
            result of `describe_buffers` is taken too, which saves looking at each tensor again.
        sources: block ids.
        destinations: as many block ids, each at most once.

    Raises:
        ValueError: the lengths differ, a destination comes twice, an id is outside the pool, or `buffers` are not as
            described.
    """
    table = describe_buffers(buffers)
    if len(sources) != len(destinations):
        raise ValueError(f"destinations: {len(destinations)} for {len(sources)} sources")
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
    """Encodes blocks for the kernel's table, where -1 means no block: nothing is held, or the held bytes are copied."""
    return [-1 if block is None else block for block in blocks]


@dataclass(frozen=True, slots=True)
class CopyChain:
    """Copies that must happen one after another."""

    held: int | None  # the block whose bytes are held from the start, if any
    steps: tuple[tuple[int | None, int], ...]  # (source, destination); a source of None copies the held bytes


def plan_chains(sources: Sequence[int], destinations: Sequence[int]) -> list[CopyChain]:
    """Orders copies so that each block is read before it is overwritten.

    Every destination has one writer. So a destination that no later pair reads can be written at once. When none is
    left, the rest are cycles, and each of their blocks is read once.

    Args:
        sources: block ids.
        destinations: as many, each once.

    Returns:
        Chains that have no block in common except sources that are never written. A copy of a block to itself is left
        out.
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
    waiting = dict.fromkeys(source_of)  # an ordered set
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
    """Returns the number of each destination's chain: the one of its source if that is a destination too, else its
    own."""
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
