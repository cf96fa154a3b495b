"""Decode with an fp8 cache, compared with decode with a bfloat16 cache of the same bytes (half as many tokens).

A row has the ratio of their times, and the errors of both against float64 on the numbers before any rounding.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

import torch
from kernel_sides.gpu import Bench, time_sides
from kernel_sides.gpu_cases import Grouped
from quire_kernels import BatchDecodeWithPagedKVCacheWrapper
from quire_kernels.ops.decode_paged import decode_paged_reference
from quire_kernels.shared.fp8 import E4M3, FP8_MAX, quantise_reference
from quire_kernels.shared.options import AttentionOptions
from quire_kernels.shared.paged_cache import unpack_paged_cache

PAGE_SIZE = 16
WORKSPACE_BYTES = 1 << 28
NUMBER_MAX = 4.5  # the number that becomes the largest fp8 number; normally distributed numbers seldom exceed 4.5


def rows(shape: Grouped, batches: tuple[int, ...], tokens: int, bench: Bench) -> Iterator[dict[str, Any]]:
    """Yields a row for each batch: sequences of `tokens` in the bench's dtype, and of twice as many in fp8."""
    for batch in batches:
        exact, exact_error = _side(shape, batch, tokens, bench, is_fp8=False)
        small, small_error = _side(shape, batch, 2 * tokens, bench, is_fp8=True)
        times = time_sides({"exact": exact, "fp8": small}, bench.timer, bench.rounds)
        exact_ms, fp8_ms = (statistics.median(times[name]) for name in ("exact", "fp8"))
        moved = 2 * batch * 2 * tokens * shape.kv_heads * shape.head_dim  # bytes of keys and values
        yield {
            "measured": "decode of fp8 pages", "shape": shape.name, "batch": batch, "context": 2 * tokens,
            "page_size": PAGE_SIZE, "rounds": len(times["fp8"]), "fp8_ms": round(fp8_ms, 4),
            "half_as_many_tokens_exact_ms": round(exact_ms, 4), "time_over_exact": round(fp8_ms / exact_ms, 3),
            "share_copy": round(moved / (fp8_ms / 1e3) / bench.copy_bytes_per_s, 3),
            "fp8_error": small_error, "exact_error": exact_error,
        }  # fmt: skip


def _side(shape: Grouped, batch: int, tokens: int, bench: Bench, *, is_fp8: bool) -> tuple[Any, float]:
    """Returns a launch on scattered pages, and the relative error of its first sequence."""
    count = -(-tokens // PAGE_SIZE)
    numbers = torch.randn(batch * count, 2, PAGE_SIZE, shape.kv_heads, shape.head_dim, device=bench.device)
    query = torch.randn(batch, shape.query_heads, shape.head_dim, device=bench.device).to(bench.dtype)
    table = (
        torch.arange(batch + 1, dtype=torch.int32) * count,
        torch.randperm(batch * count).int(),
        torch.full((batch,), (tokens - 1) % PAGE_SIZE + 1, dtype=torch.int32),
    )
    starts, pages_of_first, last = (each.to(bench.device) for each in (table[0][:2], table[1][:count], table[2][:1]))
    options = AttentionOptions(shape.head_dim**-0.5)
    expected, _ = decode_paged_reference(query[:1], unpack_paged_cache(numbers), starts, pages_of_first, last, options)
    pages, scale = numbers.to(bench.dtype), None
    if is_fp8:
        scale = torch.full((shape.kv_heads,), NUMBER_MAX / FP8_MAX[E4M3], device=bench.device)
        pages = quantise_reference(numbers, scale[0], E4M3)
    del numbers
    wrapper = BatchDecodeWithPagedKVCacheWrapper(torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=bench.device))
    sizes = (shape.query_heads, shape.kv_heads, shape.head_dim, PAGE_SIZE)
    wrapper.plan(*table, *sizes, q_data_type=query.dtype, kv_data_type=pages.dtype)

    def run() -> torch.Tensor:
        result = wrapper.run(query, pages, k_scale=scale, v_scale=scale)
        assert isinstance(result, torch.Tensor)
        return result

    difference = run()[:1].double() - expected
    return run, round((difference.norm() / expected.norm()).item(), 5)
