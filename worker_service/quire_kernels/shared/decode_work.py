"""Work division of decode: the sizes of tiles, and the keys of each program.

The keys of a request are cut into units (`work_units`), enough to give every multiprocessor `WAVES` programs. A unit
has at least two pages and `TILES_MIN` tiles. Requests of equal length stay whole if they already give more than half
of the programs aimed at.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from quire_kernels.shared.launch import DOT_MIN, Tiling, chip_of, multiprocessor_count
from quire_kernels.shared.paged_cache import check_index_tensor, kv_lengths
from quire_kernels.shared.work_units import ITEMS_MAX, WorkUnits, divide_work

WAVES = 2  # target for the programs per multiprocessor; the shared memory lets two run at once
# Least number of tiles per program: with two, the second tile is loaded while the program waits for the first. More
# than two make a few short sequences alone on the chip slower, although fewer units must be merged.
TILES_MIN = 2
HEAD_BLOCK_MAX = 64  # most query heads that one program attends


@dataclass(frozen=True, slots=True, eq=False)
class DecodeWork:
    """The work division of a batch; a new division can be written into the same tensors, at the same addresses."""

    work: WorkUnits
    tiling: Tiling
    partial_out: torch.Tensor  # float32 [capacity, heads, v_head_dim]
    partial_lse: torch.Tensor  # float32 [capacity, heads]
    window_left: int  # the window that the division was made for


def decode_tiling(
    chip: str, group: int, head_dim: int, v_head_dim: int, element_bytes: int, *, is_fp8: bool = False
) -> Tiling:
    """Chooses tile sizes for `group` query heads per KV head, so that no registers spill.

    Two or three tiles in flight, each about 32 KiB, hide the latency of memory.

    Args:
        chip: the result of `launch.chip_of`.
        group: query heads per KV head; a block holds all of them, or `HEAD_BLOCK_MAX`.
        head_dim: the head dim of keys.
        v_head_dim: the head dim of values.
        element_bytes: bytes per element of the queries. Products of 4-byte elements run without tensor cores, which
            takes more registers.
        is_fp8: whether the cache is fp8; converting it takes more registers.
    """
    if element_bytes == 4:
        return Tiling(DOT_MIN, 16, num_warps=8, num_stages=1) if is_fp8 else Tiling(DOT_MIN, 16, 4, 2)
    is_wide = max(head_dim, v_head_dim) > 128
    block_m = min(HEAD_BLOCK_MAX, max(DOT_MIN, triton.next_power_of_2(group)))
    block_n = 32 if is_wide else 64
    if chip == "gfx942":
        return Tiling(block_m, block_n, num_warps=4, num_stages=2)
    num_warps = 8 if is_fp8 and (chip == "sm_80" or not is_wide) else 4
    return Tiling(block_m, block_n, num_warps, num_stages=3 if is_wide else 4)


def decode_capacity(batch: int, kv_heads: int, group: int, tiling: Tiling, device: torch.device) -> int:
    """Returns the most units that a batch is cut into; each unit has a program per KV head and block of query heads.

    Example: on 132 multiprocessors, 8 KV heads of 4 query heads give ceil(2 * 132 / 8) = 33 units plus one per request.
    """
    blocks = kv_heads * triton.cdiv(group, tiling.block_m)
    return max(1, triton.cdiv(WAVES * multiprocessor_count(device), blocks)) + batch


def divide_decode(
    indptr: torch.Tensor,
    last_page_len: torch.Tensor,
    *,
    page_size: int,
    query_heads: int,
    kv_heads: int,
    head_dim: int,
    v_head_dim: int,
    element_bytes: int,
    is_fp8: bool = False,
    window_left: int = -1,
    split_keys: bool = True,
    workspace: torch.Tensor | None = None,
    out: DecodeWork | None = None,
) -> DecodeWork:
    """Cuts the requests of a page table into units, on its device, once per forward pass for all layers.

    Args:
        indptr: int32 `[batch + 1]`.
        last_page_len: int32 `[batch]`.
        page_size: tokens per page.
        query_heads: a multiple of kv_heads.
        kv_heads: KV heads.
        head_dim: the head dim of keys.
        v_head_dim: the head dim of values.
        element_bytes: bytes per element of the queries.
        is_fp8: whether the cache is fp8.
        window_left: see `AttentionOptions`.
        split_keys: whether a request may be cut into several units.
        workspace: uint8, aligned to 16 bytes; memory for the partial results; None allocates it.
        out: an earlier division to overwrite; None allocates a new one.

    Raises:
        ValueError: a dtype or shape does not fit, or the workspace is too small.
    """
    check_index_tensor("indptr", indptr)
    batch = indptr.shape[0] - 1
    check_index_tensor("last_page_len", last_page_len, length=batch)
    group = query_heads // kv_heads
    tiling = decode_tiling(chip_of(indptr.device), group, head_dim, v_head_dim, element_bytes, is_fp8=is_fp8)
    last = kv_lengths(indptr, last_page_len, page_size)
    first = torch.zeros_like(last)
    if window_left >= 0:
        first = (last - 1 - window_left).clamp_(min=0) // tiling.block_n * tiling.block_n
    capacity = decode_capacity(batch, kv_heads, group, tiling, indptr.device)
    work = divide_work(
        first,
        last,
        unit_target=capacity - batch,
        size_min=max(2 * page_size, TILES_MIN * tiling.block_n) if split_keys else ITEMS_MAX.value,
        alignment=tiling.block_n,
        units_min=1,
        out=None if out is None else out.work,
    )
    if out is not None:
        return out
    out_size, lse_size = capacity * query_heads * v_head_dim, capacity * query_heads
    if workspace is None:
        workspace = torch.empty(4 * (out_size + lse_size), dtype=torch.uint8, device=indptr.device)
    if workspace.numel() < 4 * (out_size + lse_size):
        raise ValueError(
            f"float_workspace_buffer must have at least {4 * (out_size + lse_size)} bytes, not {workspace.numel()}"
        )
    floats = workspace[: 4 * (out_size + lse_size)].view(torch.float32)
    partial_out = floats[:out_size].view(capacity, query_heads, v_head_dim)
    partial_lse = floats[out_size:].view(capacity, query_heads)
    return DecodeWork(work, tiling, partial_out, partial_lse, window_left)
