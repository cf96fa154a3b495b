"""How many sequences of hybrid models fit into the same bytes, and a check of the worker's tensors against the plan."""

from __future__ import annotations

from array import array
from typing import NamedTuple

import torch
from hybrid_sides.shapes import Shape
from quire.planning import Layout, blocks_for
from quire_allocator.core import spec
from quire_allocator.core.pool import Pool
from quire_worker.cache import CacheSpec, KVCache
from quire_worker.state_pages import StateKey, StateTensor

PASS_TOKENS = 512  # tokens that a pass computes
BLOCK_SIZE = 16
KEY = StateKey("recurrent", 0)


class Fitting(NamedTuple):
    """The number of sequences of one length in a pool of this many bytes.

    Attributes:
        paged: the number that the allocator's pool admits.
        planned: the planner's number.
        full_attention: the number if every layer kept every token, as full attention does. Layers with states then have
            keys and values as large as the others'.
    """

    paged: int
    planned: int
    full_attention: int


def fitting(shape: Shape, layout: Layout, memory_bytes: int, token_count: int) -> Fitting:
    """Fills a pool with sequences of one length, each computed in passes, until the next one is refused."""
    block_count = blocks_for(layout, memory_bytes)
    planned = block_count // layout.blocks_peak(token_count, PASS_TOKENS)
    padded = -(-token_count // BLOCK_SIZE) * BLOCK_SIZE
    every_token = padded * len(shape.layers) * max(layer.token_bytes for layer in shape.layers)
    groups = tuple(
        spec.GroupSpec(spec.GroupKind[group.spec.kind.name], group.spec.block_size, group.spec.window)
        for group in layout.groups
    )
    pool = Pool(spec.PoolSpec(block_count, groups, watermark_block_count=0))
    count = 0
    while _grown(pool, count + 1, token_count):
        count += 1
    return Fitting(count, planned, memory_bytes // every_token)


def _grown(pool: Pool, number: int, token_count: int) -> bool:
    """Grows one more sequence until it is refused; returns whether it reached its length."""
    for end in range(min(PASS_TOKENS, token_count), token_count + 1, PASS_TOKENS):
        if number not in pool.sequences:
            grown = [pool.allocate(number, end)]
        else:
            grown = [result for _, result in pool.grow_many(array("Q", [number]), [end])[1]]
        if any(each.result is not spec.Result.OK for each in grown):
            return False
        pool.commit(number, end, b"")
    return True


class Tensors(NamedTuple):
    """Bytes of a pool, planned and as the worker's tensors need.

    Attributes:
        planned: blocks times bytes of a block.
        buffers: bytes of the buffers that the worker makes.
        layers_differ: layers that have other bytes or another place in the page than planned, or a state that is not
            read back as written.
    """

    planned: int
    buffers: int
    layers_differ: int


def tensors(shape: Shape, block_count: int) -> Tensors:
    """Makes the worker's pages without memory (device "meta"); states also get one tensor per layer on the CPU."""
    states = tuple(
        (layer.layer, (StateTensor(KEY, (layer.state_bytes // 2,), torch.bfloat16),))
        for layer in shape.layers
        if layer.state_bytes
    )
    cache_spec = CacheSpec(shape.layers, BLOCK_SIZE, torch.bfloat16, states=states)
    cache = KVCache(cache_spec, block_count, device="meta")
    slices = {layer.layer: parts for layer, parts in cache_spec.plan.slices().items()}
    differ = 0
    for layer in shape.layers:
        if layer.state_bytes:
            differ += sum(part.size for part in slices[layer.layer]) != layer.state_bytes
            continue
        pages = cache.layers[layer.layer].pages
        (part,) = slices[layer.layer if layer.shared_with is None else layer.shared_with]
        own, offset = pages[0].numel() * pages.element_size(), pages.storage_offset() * pages.element_size()
        differ += own != part.size or offset != part.offset % cache_spec.plan.slot_bytes
    planned = block_count * cache_spec.plan.page_bytes
    return Tensors(planned, cache.pool_bytes, differ + (_states_that_differ(cache_spec) if states else 0))


def _states_that_differ(cache_spec: CacheSpec) -> int:
    """Writes a different number to each layer's state of two sequences, and counts the layers that do not read it
    back."""
    groups = cache_spec.plan.checkpoint_block_count
    cache = KVCache(cache_spec, 2 * groups)
    blocks = torch.arange(2 * groups).view(groups, 2)
    for number, state in enumerate(cache.states.values()):
        state.write(KEY, blocks, torch.full((2, *state.tensors[KEY].shape), number + 1, dtype=torch.bfloat16))
    return sum(
        not bool((state.read(KEY, blocks) == number + 1).all()) for number, state in enumerate(cache.states.values())
    )
