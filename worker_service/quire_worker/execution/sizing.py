"""Sizing of a pool in blocks: from a budget of memory, or from a GPU's free memory after the model has run once.

    GPU   free = total * utilization - used - peak + current        a profiling pass measures all four
    CPU   free = the configured budget                              without one: half of the memory that is available
                                                                    once the model is loaded, at most the useful maximum
    block_count = free // bytes of a block

`used` is all memory in use on the device, by this process and others. `current` is torch's allocated share of `used`.
`peak` is torch's largest allocation while the largest batch was computed, so the temporary memory of a pass counts as
used.

On a CPU a page takes memory once it is written to, and never gives it back. Half of the memory is left to passes, other
processes and the page cache (docs/decisions/0042). The useful maximum is what `--max-running` samples need, each as
long as the model's context, but at least 256 MiB: a small model on a large machine cannot use more.
"""

from __future__ import annotations

import argparse
from fractions import Fraction
from typing import Any, NamedTuple

import structlog
import torch
from quire.errors import UsageError

from quire_worker.cache import CacheSpec, KVCache
from quire_worker.host_memory import available_bytes, host_bytes, size
from quire_worker.model.batch import Chunk, build_batch, scratch_tables
from quire_worker.model.paged_model import PagedModel

_STATE_SHARE = 0.4  # share of free memory for one copy of the states of a profiling pass; the pass holds two copies
SMALL_BYTES = 256 << 20  # a pool on a CPU may take this much memory even if its samples need less
CPU_SHARE = Fraction(1, 2)  # default share of the available memory, for a pool on a CPU
_MORE_ROOM = {  # the advice if a pool is too small, by the option that set its size
    "--blocks": "raise --blocks",
    "--kv-memory": "raise --kv-memory, lower --block-size, or use --kv-cache-dtype fp8_e4m3 or --dtype bfloat16",
}

log = structlog.get_logger()


class DeviceMemory(NamedTuple):
    """Memory of a GPU in bytes, as a profiling pass measured it, and the share of it that this worker may use."""

    total: int
    used: int
    peak: int
    current: int
    utilization: float

    @property
    def free(self) -> int:
        """Returns the bytes that pages may take; below 0 if there are none."""
        return int(self.total * Fraction(str(self.utilization))) - self.used - self.peak + self.current


class PoolMemory(NamedTuple):
    """Size of a pool, and the memory that it was computed from.

    Attributes:
        block_count: number of blocks that fit.
        budget_bytes: memory for pages.
        device: measurements of a profiled GPU; None if no GPU was profiled.
    """

    block_count: int
    budget_bytes: int
    device: DeviceMemory | None


def size_pool(
    model: PagedModel, options: argparse.Namespace, rank_count: int = 1, *, draft_block_bytes: int = 0
) -> PoolMemory:
    """Computes the size of the pool from the command line or the free memory, and logs the figures behind it.

    Args:
        model: the model that the pool is for.
        options: command line options.
        rank_count: ranks on this machine; each has a pool.
        draft_block_bytes: bytes that a draft model keeps for each block.

    Raises:
        UsageError: a block of each group does not fit, or the machine has less memory than the options ask for.
    """
    block_bytes = model.cache_spec.bytes_per_block + draft_block_bytes
    is_profiled = model.device.type == "cuda" and options.blocks is None and options.kv_memory is None
    device = profiled(model, options) if is_profiled else None
    total = device.total if device is not None else memory_of(model.device)
    if device is not None:
        budget = device.free
    elif options.blocks is not None:
        budget = options.blocks * block_bytes
    elif options.kv_memory is not None:
        budget = budget_of(options.kv_memory, total)
    else:
        useful = max(useful_blocks(model, options.max_running) * block_bytes, SMALL_BYTES)
        budget = min(int(CPU_SHARE * available_bytes()) // rank_count, useful)
    pool = PoolMemory(max(budget, 0) // block_bytes, budget, device)
    _log(model, pool, draft_block_bytes)
    option = "--blocks" if options.blocks is not None else "--kv-memory"
    check_room(model.cache_spec, pool, total, option, draft_block_bytes=draft_block_bytes)
    return pool


def budget_of(asked: int | Fraction, total: int) -> int:
    """Returns a budget in bytes: `asked` itself, or its share of `total` if it is a fraction."""
    return int(asked * total) if isinstance(asked, Fraction) else asked


def useful_blocks(model: PagedModel, running_max: int) -> int:
    """Returns the blocks of `running_max` sequences as long as the model's context that share no block."""
    return running_max * model.cache_spec.plan.blocks_peak(model.max_position, model.max_position)


def check_room(spec: CacheSpec, pool: PoolMemory, total: int, option: str, *, draft_block_bytes: int = 0) -> None:
    """Checks that a pool has a block for each group of layers and is not larger than the memory.

    Raises:
        UsageError: the pool is too small or too large; the message says by how much and which option changes it.
    """
    if pool.budget_bytes > total:
        raise UsageError(f"{option}: {size(pool.budget_bytes)} is more than the available {size(total)}")
    groups = len(spec.groups)
    if pool.block_count >= groups:
        return
    block_bytes = spec.bytes_per_block + draft_block_bytes
    needed = groups * block_bytes
    takes = f"the pool needs at least {groups} blocks of {block_bytes:,} bytes, one for each group of layers"
    if pool.device is None:
        missing = f"{size(needed - pool.budget_bytes)} are missing: {_MORE_ROOM[option]}"
        raise UsageError(f"{option}: {pool.block_count} blocks cannot hold any token; {takes}; {missing}")
    found = pool.device
    raise UsageError(
        f"no room for pages: {size(found.total)} x {found.utilization} - {size(found.used)} used - "
        f"{size(found.peak)} at the peak + {size(found.current)} allocated leaves {size(found.free)}; {takes}; "
        f"{size(needed - found.free)} are missing: raise --gpu-memory-utilization, lower --max-batch-tokens, or use "
        "--kv-cache-dtype fp8_e4m3 or --dtype bfloat16"
    )


def longest_sequence(model: PagedModel, cache: KVCache, options: argparse.Namespace) -> int:
    """Returns the tokens of the longest sequence that both the model and the pool can hold.

    Logs a warning if that is less than the model's context.

    Raises:
        UsageError: this length is less than --max-model-len, a length that callers rely on.
    """
    held = min(model.max_position, cache.sequence_tokens_max(options.max_batch_tokens))
    if held >= model.max_position:
        return held
    plan = model.cache_spec.plan
    needed = plan.blocks_peak(model.max_position, model.max_position) * plan.page_bytes
    more = f"--kv-memory {-(-needed // (1 << 20))}MiB"
    if options.max_model_len is not None:
        raise UsageError(
            f"--max-model-len {options.max_model_len}: the pool of {size(cache.pool_bytes)} holds a sequence of at "
            f"most {held} tokens: use {more}, or --max-model-len {held}"
        )
    log.warning(
        "the pool cannot hold a sequence as long as the model's context",
        sequence_tokens_max=held,
        context_tokens=model.max_position,
        pool=size(cache.pool_bytes),
        help=f"{more} would hold one",
    )
    return held


def profiled(model: PagedModel, options: argparse.Namespace, cuda: Any = torch.cuda) -> DeviceMemory:
    """Runs the largest batch once and measures its memory; `cuda` has the functions of `torch.cuda`."""
    cuda.reset_peak_memory_stats()
    sequence_count = options.max_running
    if model.cache_spec.plan.checkpoint_block_count > 0:
        sequence_count = profiled_sequences(model.cache_spec, sequence_count, cuda.mem_get_info()[0])
    page_bytes = _run_largest(model, options.max_batch_tokens, sequence_count)
    peak = cuda.memory_stats()["allocated_bytes.all.peak"] - page_bytes
    cuda.empty_cache()  # otherwise memory that torch keeps for reuse would count as used
    free, total = cuda.mem_get_info()
    current = cuda.memory_stats()["allocated_bytes.all.current"]
    return DeviceMemory(total, total - free, peak, current, options.gpu_memory_utilization)


def profiled_sequences(spec: CacheSpec, running_max: int, free_bytes: int) -> int:
    """Returns the number of sequences of a profiling pass: `running_max`, or fewer if the states take too much.

    A pass holds the states twice: in pages, and in the tensors that the layers return.
    """
    state_bytes = spec.plan.checkpoint_block_count * spec.bytes_per_block
    return max(1, min(running_max, int(free_bytes * _STATE_SHARE) // state_bytes))


def _run_largest(model: PagedModel, token_count: int, sequence_count: int) -> int:
    """Computes the largest pass in temporary pages. Returns the bytes of these pages."""
    spec, lengths = model.cache_spec, _lengths(token_count, sequence_count, model.max_position)
    tables, block_count = scratch_tables(spec.groups, lengths)
    pages = KVCache(spec, block_count, device=model.device)
    chunks = [Chunk([0] * length, 0, own, needs_logits=True) for length, own in zip(lengths, tables, strict=True)]
    logits = model.forward(build_batch(chunks, groups=spec.groups, device=model.device), pages)
    torch.stack(list(logits)).softmax(1)  # The peak must include the sampler's memory, and this is the same amount.
    return pages.pool_bytes


def _lengths(token_count: int, sequence_count: int, longest: int) -> list[int]:
    """Divides the tokens of a pass evenly among the samples; no sample gets more than `longest`."""
    count = min(token_count, sequence_count)
    return [min(longest, (token_count + i) // count) for i in range(count)]


def memory_of(device: torch.device) -> int:
    """Returns the memory of a GPU in bytes, or this process's limit of host memory."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info()[1])
    return host_bytes()


def _log(model: PagedModel, pool: PoolMemory, draft_block_bytes: int) -> None:
    """Logs the figures of a pool that explain its size."""
    spec, found = model.cache_spec, pool.device
    largest = largest_shape(spec)
    if found is not None:
        log.info(
            "device memory",
            total=size(found.total), used=size(found.used), peak=size(found.peak), current=size(found.current),
            utilization=found.utilization,
        )  # fmt: skip
    log.info(
        "pool memory",
        budget=size(pool.budget_bytes), kv_heads=largest[0], head_dim=largest[1], kv_cache_dtype=spec.stored_name,
        block_bytes=spec.bytes_per_block, blocks=pool.block_count, pool=size(pool.block_count * spec.bytes_per_block),
        slots=pool.block_count * spec.block_size,
        **({"draft_block_bytes": draft_block_bytes} if draft_block_bytes else {}),
    )  # fmt: skip


def largest_shape(spec: CacheSpec) -> tuple[int, int]:
    """Returns KV heads and head dim of the layer that takes the most bytes per token."""
    largest = max(spec.layers, key=lambda layer: layer.token_bytes)
    return largest.kv_head_count, largest.head_dim
