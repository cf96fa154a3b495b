"""Compiles what serving will need before the first request: a Triton kernel is compiled when it is first launched.

Launches differ, to the compiler, in dtypes, head dims, strides and sizes of blocks, not in lengths or batch sizes. So
the model itself is run on scratch pages, once for each kind of batch that kernels tell apart: one query per sequence
(decode), and a ladder of queries per sequence, since `prefill_rows.prefill_tiling` chooses the block by their mean. One
block is copied, as copy-on-write does; a token is chosen greedily, and one is drawn.
"""

from __future__ import annotations

import torch
from quire_kernels.compilation.warmup import CompilationCount, Progress, count_compilations

from quire_worker.cache import CacheSpec, KVCache
from quire_worker.model.batch import Chunk, build_batch, scratch_tables
from quire_worker.model.paged_model import PagedModel
from quire_worker.sampling.params import SamplingParams

# Tokens of one sequence by itself. Blocks of rows are chosen by the mean of rows, tokens times query heads per KV head:
# as the tokens double, every size of block is met, whatever the number of heads.
LADDER = (2, 4, 8, 16, 32, 64, 128)
# Sequences that decode beside a chunk of two tokens: 66 queries for 65 sequences are 1.02 each, so that blocks of rows
# are as large as in decode, also with 64 query heads per KV head.
COMPANY = 64
SCRATCH_BYTES = 2 << 30  # of pages for this, unless fewer than `COMPANY_MIN` sequences would decode
COMPANY_MIN = 3


def warm_up(model: PagedModel, *, progress: Progress | None = None) -> CompilationCount:
    """Runs a model over a batch of every kind.

    Args:
        model: on its device; its pages here are made for this and thrown away.
        progress: called before each step with the steps done, all steps, and what comes next; and at the end.

    Returns:
        What was compiled, or found in Triton's cache on disk; nothing in the interpreter.
    """
    spec = model.cache_spec
    steps = [
        ("decode, one sequence", [1]),
        ("decode, several sequences", [1] * COMPANY_MIN),
        ("decode beside a chunk", [2] + [1] * company_of(spec)),
        *((f"prefill, {length} tokens", [length]) for length in LADDER if length <= model.max_position),
    ]
    dealt = [scratch_tables(spec.groups, lengths) for _, lengths in steps]
    cache = KVCache(spec, max(block_count for _, block_count in dealt), device=model.device)
    with count_compilations() as found:
        for number, ((title, lengths), (tables, _)) in enumerate(zip(steps, dealt, strict=True)):
            if progress is not None:
                progress(number, len(steps), title)
            chunks = [
                Chunk([0] * length, 0, own, needs_logits=True) for length, own in zip(lengths, tables, strict=True)
            ]
            model.forward(build_batch(chunks, groups=spec.groups, device=model.device), cache).cpu()
        model.attention.copy_blocks(cache.buffers, [0], [1])
        logits = torch.zeros(1, model.vocab_size, device=model.device)
        for params in (SamplingParams(), SamplingParams(temperature=1.0)):
            model.attention.choose(logits, [params], lambda: torch.zeros(1, dtype=torch.float64))
    if progress is not None:
        progress(len(steps), len(steps), "done")
    return found


def company_of(spec: CacheSpec) -> int:
    """Counts the sequences that decode beside a chunk: fewer where each of them has hundreds of MB of states."""
    sequence_bytes = len(spec.groups) * spec.bytes_per_block
    return max(COMPANY_MIN, min(COMPANY, SCRATCH_BYTES // sequence_bytes - 1))
