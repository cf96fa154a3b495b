"""Compiles kernels before the first request, because Triton compiles a kernel when it is first launched.

Triton compiles a variant for each set of dtypes, head dims, strides and block sizes, not for each length or batch size.
So the model runs on scratch pages, once for each kind of batch that kernels distinguish. The kinds are one query per
sequence (decode), and a ladder of queries per sequence, because `prefill_rows.prefill_tiling` chooses the block size by
the mean. Then one block is copied, as copy-on-write does, one token is chosen greedily, and one is drawn.
"""

from __future__ import annotations

import torch
from quire_kernels.compilation.warmup import CompilationCount, Progress, count_compilations

from quire_worker.cache import CacheSpec, KVCache
from quire_worker.model.batch import Chunk, build_batch, scratch_tables
from quire_worker.model.paged_model import PagedModel
from quire_worker.sampling.params import SamplingParams

# Token counts of the steps with a single sequence. The kernel's block size depends on the mean number of rows per
# sequence: tokens times query heads per KV head. The counts double from step to step, so every block size occurs, for
# any number of heads.
LADDER = (2, 4, 8, 16, 32, 64, 128)
# Number of sequences that decode beside a chunk of two tokens. These 65 sequences have 66 queries, a mean of 1.02, so
# the block size is the same as for decode, even with 64 query heads per KV head.
COMPANY = 64
SCRATCH_BYTES = 2 << 30  # limit of the scratch pages; at least `COMPANY_MIN` sequences run even beyond this limit
COMPANY_MIN = 3


def warm_up(model: PagedModel, *, progress: Progress | None = None) -> CompilationCount:
    """Runs a model over a batch of every kind.

    Args:
        model: a model on its device. The model runs on temporary pages.
        progress: called before each step and at the end, with the steps done, all steps, and the next step's name.

    Returns:
        The counts of kernels compiled and of kernels found in Triton's cache on disk; 0 in Triton's interpreter.
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
            model.attention.choose_tokens(logits, [params], lambda: torch.zeros(1, dtype=torch.float64))
    if progress is not None:
        progress(len(steps), len(steps), "done")
    return found


def company_of(spec: CacheSpec) -> int:
    """Returns how many sequences decode together with a chunk: fewer if each of them has hundreds of MB of states."""
    sequence_bytes = len(spec.groups) * spec.bytes_per_block
    return max(COMPANY_MIN, min(COMPANY, SCRATCH_BYTES // sequence_bytes - 1))
