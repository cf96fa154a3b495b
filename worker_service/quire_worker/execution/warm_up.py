"""Compiles what serving will need before the first request: a Triton kernel is compiled when it is first launched.

Launches differ, to the compiler, in dtypes, head dims, strides and sizes of blocks, not in lengths or batch sizes. So
the model itself is run on scratch pages, once for each kind of batch that kernels tell apart: one query per sequence
(decode), and a ladder of queries per sequence, since `prefill_rows.prefill_tiling` chooses the block by their mean. One
block is copied, as copy-on-write does; a token is chosen greedily, and one is drawn.
"""

from __future__ import annotations

import torch
from quire_kernels.compilation.warmup import CompilationCount, Progress, count_compilations

from quire_worker.cache import KVCache
from quire_worker.model.batch import Chunk, build_batch
from quire_worker.model.paged_model import PagedModel
from quire_worker.sampling.params import SamplingParams

# Tokens of one sequence by itself. Blocks of rows are chosen by the mean of rows, tokens times query heads per KV head:
# as the tokens double, every size of block is met, whatever the number of heads.
LADDER = (2, 4, 8, 16, 32, 64, 128)
# Sequences that decode beside a chunk of two tokens: 66 queries for 65 sequences are 1.02 each, so that blocks of rows
# are as large as in decode, also with 64 query heads per KV head.
COMPANY = 64


def warm_up(model: PagedModel, *, progress: Progress | None = None) -> CompilationCount:
    """Runs a model over a batch of every kind.

    Args:
        model: on its device; its pages here are made for this and thrown away.
        progress: called before each step with the steps done, all steps, and what comes next; and at the end.

    Returns:
        What was compiled, or found in Triton's cache on disk; nothing in the interpreter.
    """
    steps = [
        ("decode, one sequence", [1]),
        ("decode, several sequences", [1] * 3),
        ("decode beside a chunk", [2] + [1] * COMPANY),
        *((f"prefill, {length} tokens", [length]) for length in LADDER if length <= model.max_position),
    ]
    spec = model.cache_spec
    position_count = max(_block_count(lengths, spec.block_size) for _, lengths in steps)
    cache = KVCache(spec, len(spec.groups) * position_count, device=model.device)
    groups = range(len(spec.groups))
    with count_compilations() as found:
        for number, (title, lengths) in enumerate(steps):
            if progress is not None:
                progress(number, len(steps), title)
            chunks, first = [], 0
            for length in lengths:
                stop = first + _block_count([length], spec.block_size)
                tables = [range(group * position_count + first, group * position_count + stop) for group in groups]
                chunks.append(Chunk([0] * length, 0, tables, needs_logits=True))
                first = stop
            model.forward(build_batch(chunks, groups=spec.groups, device=model.device), cache).cpu()
        model.attention.copy_blocks(cache.buffers, [0], [1])
        logits = torch.zeros(1, model.vocab_size, device=model.device)
        for params in (SamplingParams(), SamplingParams(temperature=1.0)):
            model.attention.choose(logits, [params], lambda: torch.zeros(1, dtype=torch.float64))
    if progress is not None:
        progress(len(steps), len(steps), "done")
    return found


def _block_count(lengths: list[int], block_size: int) -> int:
    return sum(-(-length // block_size) for length in lengths)
