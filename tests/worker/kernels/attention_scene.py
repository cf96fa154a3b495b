"""Batches of queries and keys for the attention kernels, in a pool that has NaN in all unused slots."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from quire_kernels.ops.decode_paged import decode_paged, decode_paged_reference
from quire_kernels.ops.prefill_attention import prefill_paged, prefill_paged_reference
from quire_kernels.shared.decode_work import divide_decode
from quire_kernels.shared.fp8 import is_fp8
from quire_kernels.shared.options import AttentionOptions
from quire_kernels.shared.paged_cache import PagedCache, unpack_paged_cache
from quire_kernels.shared.prefill_rows import Masking, divide_prefill, prefill_tiling
from quire_kernels.shared.reference import LSE_TOLERANCE, TOLERANCE

LAYOUTS = ("NHD", "HND", "NHD pair", "HND pair", "strided")


@dataclass(eq=False)
class Scene:
    """Requests with the given lengths; their pages are scattered over a pool with spare pages."""

    lengths: list[int]
    page_size: int = 16
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    v_head_dim: int | None = None
    dtype: torch.dtype = torch.float32
    cache_dtype: torch.dtype | None = None
    layout: str = "NHD"
    query_lengths: list[int] | None = None  # None: each request has one query (decode)
    last_of_none: int = 0  # `last_page_len` of requests without pages; kernels must ignore this number
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def __post_init__(self) -> None:
        counts = [-(-length // self.page_size) for length in self.lengths]
        self.page_count = sum(counts) + 3
        ids = torch.randperm(self.page_count)[: sum(counts)]
        self.indptr = self.index([0, *counts]).cumsum(0, dtype=torch.int32)
        self.indices = ids.to(device=self.device, dtype=torch.int32)
        self.last_page_len = self.index(
            [(n - 1) % self.page_size + 1 if n else self.last_of_none for n in self.lengths]
        )
        v_head_dim = self.v_head_dim or self.head_dim
        shape = (self.page_count, self.page_size, self.kv_heads)
        k, v = torch.full((*shape, self.head_dim), torch.nan), torch.full((*shape, v_head_dim), torch.nan)
        for request, length in enumerate(self.lengths):
            for position in range(length):
                page = ids[int(self.indptr[request]) + position // self.page_size]
                k[page, position % self.page_size] = torch.randn(self.kv_heads, self.head_dim)
                v[page, position % self.page_size] = torch.randn(self.kv_heads, v_head_dim)
        dtype = self.cache_dtype or self.dtype
        self.cache = self._laid_out(k.to(dtype), v.to(dtype))
        tokens = sum(self.query_lengths) if self.query_lengths else len(self.lengths)
        self.q = torch.randn(tokens, self.heads, self.head_dim).to(device=self.device, dtype=self.dtype)
        self.qo_indptr = self.index([0, *(self.query_lengths or [1] * len(self.lengths))]).cumsum(0, dtype=torch.int32)

    def index(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def _laid_out(self, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        k, v = k.to(self.device), v.to(self.device)
        if self.layout.startswith("HND"):
            k, v = k.transpose(1, 2).contiguous(), v.transpose(1, 2).contiguous()
        if self.layout.endswith("pair"):
            return k, v
        # Keys and values take every other element of the head dim. Pages lie in reverse order in memory.
        if self.layout == "strided":
            wide = torch.stack([k, v], 1).flatten(-1).repeat_interleave(2, -1).movedim(0, 2).contiguous().movedim(2, 0)
            return wide[..., ::2]
        return (
            torch.stack([k.view(torch.uint8), v.view(torch.uint8)], 1).view(k.dtype)
            if is_fp8(k.dtype)
            else (torch.stack([k, v], 1))
        )

    @property
    def unpacked(self) -> PagedCache:
        return unpack_paged_cache(self.cache, self.layout[:3] if self.layout != "strided" else "NHD")

    @property
    def table(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.indptr, self.indices, self.last_page_len

    def options(self, **changes: object) -> AttentionOptions:
        return AttentionOptions(**{"sm_scale": self.head_dim**-0.5, **changes})  # type: ignore[arg-type]

    def numbers(self, count: int) -> torch.Tensor:
        return torch.randn(count).to(self.device)

    def decode(self, options: AttentionOptions) -> tuple[torch.Tensor, torch.Tensor]:
        cache = self.unpacked
        division = divide_decode(
            self.indptr,
            self.last_page_len,
            page_size=self.page_size,
            query_heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=cache.head_dim,
            v_head_dim=cache.v_head_dim,
            element_bytes=self.dtype.itemsize,
            is_fp8=is_fp8(cache.dtype),
            window_left=options.window_left,
        )
        return decode_paged(self.q, cache, *self.table, options, division)

    def prefill(self, options: AttentionOptions, masking: Masking) -> tuple[torch.Tensor, torch.Tensor]:
        cache, group = self.unpacked, self.heads // self.kv_heads
        tokens = self.q.shape[0]
        tiling = prefill_tiling("sm_90", tokens * group // len(self.lengths), cache.head_dim, cache.v_head_dim, 4)
        division = divide_prefill(self.qo_indptr, token_count=tokens, group=group, tiling=tiling)
        return prefill_paged(self.q, cache, self.qo_indptr, *self.table, options, masking, division)

    def check_decode(self, **changes: object) -> None:
        options = self.options(**changes)
        assert_close(self.decode(options), decode_paged_reference(self.q, self.unpacked, *self.table, options))

    def check_prefill(self, masking: Masking | None = None, **changes: object) -> None:
        options, masking = self.options(**changes), masking or Masking(causal=True)
        expected = prefill_paged_reference(self.q, self.unpacked, self.qo_indptr, *self.table, options, masking)
        assert_close(self.prefill(options, masking), expected)


def spread(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    """Copies a tensor to a layout where the last entry of a dimension is 2^31 elements after the first.

    A CPU allocates only the memory that is written. The tensor should be float16, which needs 4 GiB of addresses.
    """
    sizes = list(tensor.shape)
    strides = [0] * tensor.dim()
    step = 1
    for axis in [axis for axis in reversed(range(tensor.dim())) if axis != dim]:
        strides[axis], step = step, step * sizes[axis]
    strides[dim] = 2**31 // (sizes[dim] - 1) + step
    memory = torch.empty(strides[dim] * (sizes[dim] - 1) + step, dtype=tensor.dtype, device=tensor.device)
    return memory.as_strided(sizes, strides).copy_(tensor)


def assert_close(
    actual: tuple[torch.Tensor, torch.Tensor],
    expected: tuple[torch.Tensor, torch.Tensor],
    *,
    dtype: torch.dtype | None = None,
) -> None:
    """Compares outputs and lse. NaN fails, and -inf must be in the same places."""
    tolerance = TOLERANCE[dtype or actual[0].dtype]
    torch.testing.assert_close(actual[0].double(), expected[0], rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(actual[1].double(), expected[1], rtol=LSE_TOLERANCE, atol=LSE_TOLERANCE)
