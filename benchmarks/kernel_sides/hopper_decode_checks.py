"""A check of a new GPU: errors of decode against float64, and times, on shapes that take a few seconds.

Each check yields a row as soon as it has a result: the shape, the largest error of a head's row divided by the row's
root mean square, the largest error of lse, and on a GPU the median time of a launch. Latent attention is checked twice,
with the Hopper kernel and the Triton kernel, under the same division of work. Without a GPU the interpreter runs
smaller shapes.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import torch
from quire_kernels.ops import mla_hopper
from quire_kernels.ops.decode_paged import decode_paged, decode_paged_reference
from quire_kernels.ops.mla_paged import mla_paged, mla_paged_reference
from quire_kernels.shared.decode_work import divide_decode
from quire_kernels.shared.mla_work import divide_mla
from quire_kernels.shared.options import AttentionOptions
from quire_kernels.shared.paged_cache import PagedCache
from quire_kernels.shared.reference import LSE_TOLERANCE

Row = dict[str, Any]
Pair = tuple[torch.Tensor, torch.Tensor]  # out and lse

LATENT = (  # lengths of the requests, heads, page size
    ([8192] * 32, 128, 64),
    ([8192], 128, 64),
    ([1024] * 256, 128, 64),
    ([8192] * 32, 128, 16),
    ([1024] * 32, 128, 16),
    ([0, 1, 63, 64, 65, 4000, 129, 16, 17], 80, 16),
)
LATENT_TINY = (([70, 3, 0], 20, 16),)
GROUPED = (  # lengths of the requests, query heads, KV heads, page size
    ([1024], 32, 8, 16),
    ([8192], 32, 8, 16),
    ([65536], 32, 8, 16),
    ([8192] * 32, 32, 8, 16),
    ([8192] * 32, 40, 8, 16),
    ([0, 1, 63, 64, 65, 4000, 129, 16, 17], 28, 4, 64),
)
GROUPED_TINY = (([70, 3, 0], 6, 2, 16),)
REFERENCE_KEYS = 1 << 15  # The reference covers the first requests, up to this many keys, because float64 is slow.
KERNELS = {"triton": "0", "gluon": "1"}  # the value of QUIRE_HOPPER that selects each kernel
ROW_TOLERANCE = 0.1  # largest allowed error, divided by a row's root mean square; `gpu.py` has the reason
ROUNDS, FLUSH_BYTES = 20, 256 << 20


def latent_checks(kernels: tuple[str, ...] = ("gluon",)) -> Iterator[Row]:
    """Yields a row for each shape of latent attention and each kernel."""
    has_gpu = torch.cuda.is_available()
    for lengths, heads, page_size in LATENT if has_gpu else LATENT_TINY:
        batch = len(lengths)
        table, tokens = _table(lengths, page_size)
        pool = _pool(lengths, table, page_size, 576)
        query = torch.randn(batch, heads, 576, device=pool.device).to(pool.dtype)
        ckv, kpe = pool[..., :512], pool[..., 512:]
        q_nope, q_pe = query[..., :512], query[..., 512:]
        qo_indptr = torch.arange(batch + 1, dtype=torch.int32, device=pool.device)
        division = divide_mla(
            qo_indptr, tokens, token_count=batch, split_keys=True, heads=heads, ckv_dim=512, element_bytes=2,
            page_size=page_size,
        )  # fmt: skip
        compared = _compared(lengths)
        expected = mla_paged_reference(
            q_nope[:compared], q_pe[:compared], (ckv, kpe), qo_indptr[: compared + 1], table, sm_scale=0.07,
            causal=True,
        )  # fmt: skip

        def attend(
            parts: Any = (q_nope, q_pe, ckv, kpe), indices: Any = (qo_indptr, *table[:2], tokens), work: Any = division
        ) -> Pair:
            return mla_paged(*parts, *indices, work, sm_scale=0.07, causal=True)  # type: ignore[misc]

        operations = 2 * heads * (512 + 576) * sum(lengths)
        parts = {"q_nope": q_nope, "q_pe": q_pe, "ckv": ckv, "kpe": kpe}
        for name in kernels if has_gpu else ("triton",):
            os.environ[mla_hopper.SWITCH] = KERNELS[name]
            if name != "triton" and not mla_hopper.fits_hopper(parts, division):
                continue
            row = {"kernel": name, **_shape(lengths, page_size), "heads": heads}
            yield row | _measured(attend, expected, operations=operations)
        os.environ.pop(mla_hopper.SWITCH)


def decode_checks() -> Iterator[Row]:
    """Yields a row for each shape of decode with grouped heads."""
    has_gpu = torch.cuda.is_available()
    for lengths, heads, kv_heads, page_size in GROUPED if has_gpu else GROUPED_TINY:
        table, _ = _table(lengths, page_size)
        pool = _pool(lengths, table, page_size, 2 * kv_heads * 128).view(-1, page_size, kv_heads, 2, 128)
        cache = PagedCache(pool[..., 0, :], pool[..., 1, :])
        query = torch.randn(len(lengths), heads, 128, device=pool.device).to(pool.dtype)
        options = AttentionOptions(128**-0.5)
        division = divide_decode(
            table[0], table[2], page_size=page_size, query_heads=heads, kv_heads=kv_heads, head_dim=128,
            v_head_dim=128, element_bytes=2,
        )  # fmt: skip
        compared = _compared(lengths)
        expected = decode_paged_reference(
            query[:compared], cache, table[0][: compared + 1], table[1], table[2][:compared], options
        )

        def attend(q: Any = query, keys: Any = cache, indices: Any = table, given: Any = options, work: Any = division
        ) -> Pair:  # fmt: skip
            return decode_paged(q, keys, *indices, given, work)  # type: ignore[call-arg]

        row = {"kernel": "triton", **_shape(lengths, page_size), "heads": f"{heads}/{kv_heads}"}
        yield row | _measured(attend, expected, moved_bytes=sum(lengths) * 2 * kv_heads * 128 * 2)


def _shape(lengths: list[int], page_size: int) -> Row:
    return {"batch": len(lengths), "keys_max": max(lengths), "page_size": page_size}


def _table(lengths: list[int], page_size: int) -> tuple[tuple[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]:
    """Returns indptr, indices and last_page_len of scattered pages, and the lengths, int32 `[batch]`."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    counts = [-(-length // page_size) for length in lengths]
    last = [length - (count - 1) * page_size if count else 0 for length, count in zip(lengths, counts, strict=True)]
    indptr = torch.tensor([0, *counts]).cumsum(0)
    tensors = (indptr, torch.randperm(sum(counts) + 2)[: sum(counts)], torch.tensor(last), torch.tensor(lengths))
    indptr, indices, last_page_len, tokens = (tensor.to(device=device, dtype=torch.int32) for tensor in tensors)
    return (indptr, indices, last_page_len), tokens


def _pool(lengths: list[int], table: Any, page_size: int, elements: int) -> torch.Tensor:
    """Returns random pages `[pages, page_size, elements]`, bfloat16; slots without a token hold NaN."""
    indptr, indices, last_page_len = table
    pool = torch.full(
        (indices.shape[0] + 2, page_size, elements), torch.nan, dtype=torch.bfloat16, device=indices.device
    )
    pool[indices.long()] = torch.randn(indices.shape[0], page_size, elements, device=pool.device).to(pool.dtype)
    for request, length in enumerate(lengths):
        if length:
            pool[indices[indptr[request + 1] - 1].long(), int(last_page_len[request]) :] = torch.nan
    return pool


def _compared(lengths: list[int]) -> int:
    """Returns how many of the first requests are compared with float64."""
    count = keys = 0
    while count < len(lengths) and (count == 0 or keys + lengths[count] <= REFERENCE_KEYS):
        keys += lengths[count]
        count += 1
    return count


def _measured(attend: Callable[[], Pair], expected: Pair, *, operations: int = 0, moved_bytes: int = 0) -> Row:
    """Returns the errors of a launch, and on a GPU its time and rate."""
    out, lse = attend()
    wanted, wanted_lse = expected
    compared = wanted.shape[0]
    size = wanted.square().mean(-1).sqrt().clamp_min(1e-30)
    error = ((out[:compared].double() - wanted).abs().amax(-1) / size).max()
    seen = lse[:compared].double()
    lse_error = torch.where(seen == wanted_lse, 0.0, (seen - wanted_lse).abs() / (1 + wanted_lse.abs())).max()
    passed = bool(error <= ROW_TOLERANCE) and bool(lse_error <= LSE_TOLERANCE) and bool(out.isfinite().all())
    row: Row = {"passed": passed, "error": round(error.item(), 4), "lse_error": f"{lse_error.item():.1e}"}
    if out.device.type == "cuda":
        seconds = _median_s(attend)
        row["us"] = round(seconds * 1e6, 1)
        if operations:
            row["tflop_per_s"] = round(operations / seconds / 1e12, 1)
        if moved_bytes:
            row["gb_per_s"] = round(moved_bytes / seconds / 1e9, 1)
    return row


def _median_s(attend: Callable[[], Pair]) -> float:
    """Returns the median time of a launch with cold caches, as `gpu.CudaTimer` measures it."""
    other, times = torch.zeros(FLUSH_BYTES // 4, device="cuda"), []
    for _ in range(ROUNDS):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for _ in range(4):
            other.sum()
        start.record()
        attend()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) / 1e3)
    return statistics.median(times)
