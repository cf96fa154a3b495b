"""Work division of latent attention: the sizes of tiles, and the latents or rows of each program."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from quire_kernels.shared.launch import Tiling, chip_of, is_hopper, multiprocessor_count
from quire_kernels.shared.paged_cache import check_index_tensor
from quire_kernels.shared.work_units import WorkUnits, divide_work

WAVES = 2  # programs per multiprocessor that decode aims at
# For `mla_hopper`: one program fills a multiprocessor, and each additional unit costs 256 KiB of partial results.
HOPPER_WAVES, HOPPER_KEYS, HOPPER_HEADS = 1, 64, 64


@dataclass(frozen=True, slots=True, eq=False)
class MlaWork:
    """The work division of a batch."""

    work: WorkUnits
    tiling: Tiling
    split_keys: bool  # True if every request has one query; units then are ranges of keys, not of rows
    heads: int
    token_count: int
    partial_out: torch.Tensor | None  # float32 [capacity, heads, ckv_dim], only with split_keys
    partial_lse: torch.Tensor | None  # float32 [capacity, heads]


def mla_tiling(chip: str, heads: int, element_bytes: int) -> Tiling:
    """Chooses tile sizes for latents of 512 + 64. Larger tiles would spill registers: a row has 512 sums."""
    if chip == "gfx942":
        return Tiling(16, 16, num_warps=4, num_stages=1)
    if element_bytes == 4:
        return Tiling(16, 16, num_warps=8, num_stages=1)
    if heads <= 16 or chip == "sm_80":
        return Tiling(16, 32, num_warps=8 if chip == "sm_80" else 4, num_stages=3)
    return Tiling(64, 32, num_warps=8, num_stages=3)


def divide_mla(
    qo_indptr: torch.Tensor,
    kv_lengths: torch.Tensor,
    *,
    token_count: int,
    split_keys: bool,
    heads: int,
    ckv_dim: int,
    element_bytes: int,
    page_size: int,
    out: MlaWork | None = None,
) -> MlaWork:
    """Cuts the keys of each request (decode) or its rows (prefill) into units, on the device.

    Args:
        qo_indptr: int32 `[batch + 1]`.
        kv_lengths: int32 `[batch]`, in tokens.
        token_count: query tokens, or an upper bound.
        split_keys: every request has exactly one query.
        heads: query heads.
        ckv_dim: dims of a latent without its rotary part; a power of two.
        element_bytes: bytes per element of the queries.
        page_size: tokens per page.
        out: an earlier division to overwrite; None allocates a new one.

    Raises:
        ValueError: a dtype or shape does not fit.
    """
    check_index_tensor("qo_indptr", qo_indptr, length=kv_lengths.shape[0] + 1)
    check_index_tensor("kv_lengths", kv_lengths)
    device, batch = qo_indptr.device, kv_lengths.shape[0]
    tiling = mla_tiling(chip_of(device), heads, element_bytes)
    work = None if out is None else out.work
    if not split_keys:
        rows = qo_indptr.diff() * heads
        capacity = triton.cdiv(token_count * heads, tiling.block_m) + batch
        work = divide_work(
            torch.zeros_like(rows), rows, unit_target=None, size_min=tiling.block_m, capacity=capacity, out=work
        )
        return out or MlaWork(work, tiling, split_keys, heads, token_count, None, None)
    waves, alignment = WAVES, tiling.block_n
    if is_hopper(device) and tiling.block_m == HOPPER_HEADS:
        waves, alignment = HOPPER_WAVES, HOPPER_KEYS
    target = max(1, triton.cdiv(waves * multiprocessor_count(device), triton.cdiv(heads, tiling.block_m)))
    work = divide_work(
        torch.zeros_like(kv_lengths), kv_lengths, unit_target=target, size_min=2 * max(page_size, alignment),
        alignment=alignment,
        units_min=1, out=work,
    )  # fmt: skip
    if out is not None:
        return out
    partial_out = torch.empty(work.capacity, heads, ckv_dim, dtype=torch.float32, device=device)
    partial_lse = torch.empty(work.capacity, heads, dtype=torch.float32, device=device)
    return MlaWork(work, tiling, split_keys, heads, token_count, partial_out, partial_lse)
