"""Merges the partial results of requests that were cut into several units.

With partial outputs o_s and their base-2 log-sum-exps L_s over the units s of a request, per query head:

    L = log2(sum_s 2^L_s);   o = sum_s 2^(L_s - L) o_s

A request of one unit has been written directly and is skipped. There is one program per request and query head. In
large batches most requests need no merge, so one program takes several heads.
"""

from __future__ import annotations

import itertools

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from quire_kernels.shared.launch import can_overlap, check_devices, device_of
from quire_kernels.shared.work_units import WorkUnits

LOG2_E = 1.4426950408889634
BLOCK_SPLITS_MAX, BLOCK_ELEMENTS = 32, 8192  # most splits and most elements of a block: 64 registers per thread
NUM_WARPS = 4
PROGRAMS_MAX = 4096  # most programs, about 32 per multiprocessor: even a program that finds nothing to merge costs time


def block_splits(block_v: int) -> int:
    """Returns how many partial results of `block_v` elements are read at once."""
    return max(1, min(BLOCK_SPLITS_MAX, BLOCK_ELEMENTS // block_v))


@triton.jit(
    do_not_specialize=["heads", "heads_per_program"],
    do_not_specialize_on_alignment=["partial_lse", "unit_indptr", "lse"],
)
def merge_splits_kernel(
    partial_out,  # float32 [capacity, heads, V_DIM], contiguous
    partial_lse,  # float32 [capacity, heads], contiguous
    unit_indptr,  # int32 [batch + 1]
    out,  # [batch, heads, V_DIM]
    lse,  # float32 [batch, heads], contiguous, or None
    heads,
    heads_per_program,
    stride_out_token,
    stride_out_head,
    stride_out_dim,
    V_DIM: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Merges online over blocks of splits, so the number of splits is not limited."""
    blocks = (heads + heads_per_program - 1) // heads_per_program
    request = (tl.program_id(0) // blocks).to(tl.int64)
    first = tl.load(unit_indptr + request)
    count = tl.load(unit_indptr + request + 1) - first
    if OVERLAP:
        # Waits for the partial results; `unit_indptr` was ready before them. Most programs have nothing to merge and
        # return at once. The first program always waits: otherwise this launch could end, and the next launch start,
        # before the launch that computes the units has ended.
        if (count > 1) | (tl.program_id(0) == 0):
            gdc_wait()
    if count <= 1:
        return
    dims = tl.arange(0, BLOCK_V)
    lane = tl.arange(0, BLOCK_SPLITS)
    head_start = tl.program_id(0) % blocks * heads_per_program
    for head in range(head_start, tl.minimum(head_start + heads_per_program, heads)):
        acc = tl.zeros((BLOCK_V,), dtype=tl.float32)
        running_max = tl.full((), float("-inf"), dtype=tl.float32)
        running_sum = tl.zeros((), dtype=tl.float32)
        for block in range(0, count, BLOCK_SPLITS):
            valid = block + lane < count
            row = (first + block + lane).to(tl.int64) * heads + head
            part_lse = tl.load(partial_lse + row, mask=valid, other=float("-inf"))
            part = tl.load(
                partial_out + row[:, None] * V_DIM + dims[None, :],
                mask=valid[:, None] & (dims < V_DIM)[None, :],
                other=0.0,
            )
            new_max = tl.maximum(running_max, tl.max(part_lse, 0))
            base = tl.where(new_max == float("-inf"), 0.0, new_max)
            weight = tl.exp2(part_lse - base)
            alpha = tl.exp2(running_max - base)
            acc = acc * alpha + tl.sum(part * weight[:, None], 0)
            running_sum = running_sum * alpha + tl.sum(weight, 0)
            running_max = new_max
        nothing = running_sum == 0.0
        safe_sum = tl.where(nothing, 1.0, running_sum)
        target = out + request * stride_out_token + (request * 0 + head) * stride_out_head  # int64
        target += dims.to(tl.int64) * stride_out_dim
        tl.store(target, (acc / safe_sum).to(out.dtype.element_ty), mask=dims < V_DIM)
        if lse is not None:
            tl.store(lse + request * heads + head, tl.where(nothing, float("-inf"), running_max + tl.log2(safe_sum)))


def merge_splits(
    partial_out: torch.Tensor,
    partial_lse: torch.Tensor,
    work: WorkUnits,
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> None:
    """Writes `out` and `lse` of every request that has several units.

    Args:
        partial_out: float32 `[capacity, heads, v_head_dim]`, contiguous; row u is the result of unit u.
        partial_lse: float32 `[capacity, heads]`, contiguous, base 2.
        work: the work division.
        out: `[batch, heads, v_head_dim]`, any strides, float16, bfloat16 or float32; written in place.
        lse: float32 `[batch, heads]`, contiguous, base 2, written in place; or None.

    Raises:
        ValueError: a shape, dtype, device or stride does not fit; the message names the argument.
    """
    batch, heads, v_head_dim = out.shape
    if batch != work.batch:
        raise ValueError(f"out must have {work.batch} requests, like the division, not {batch}")
    for name, tensor, shape in (
        ("partial_out", partial_out, (work.capacity, heads, v_head_dim)),
        ("partial_lse", partial_lse, (work.capacity, heads)),
        ("lse", lse, (batch, heads)),
    ):
        if tensor is not None and (
            tensor.dtype != torch.float32 or tuple(tensor.shape) != shape or not tensor.is_contiguous()
        ):
            raise ValueError(f"{name} must be contiguous float32 {shape}, not {tensor.dtype} {tuple(tensor.shape)}")
    check_devices(out.device, partial_out=partial_out, partial_lse=partial_lse, lse=lse, units=work.units)
    if batch == 0:
        return
    block_v, overlap = triton.next_power_of_2(v_head_dim), can_overlap(out.device)
    heads_per_program = min(heads, triton.cdiv(batch * heads, PROGRAMS_MAX))
    with device_of(merge_splits_kernel, out=out):
        merge_splits_kernel[(batch * triton.cdiv(heads, heads_per_program),)](
            partial_out, partial_lse, work.indptr, out, lse, heads, heads_per_program, *out.stride(),
            V_DIM=v_head_dim, BLOCK_V=block_v, BLOCK_SPLITS=block_splits(block_v), OVERLAP=overlap,
            num_warps=NUM_WARPS, **({"launch_pdl": True} if overlap else {}),
        )  # fmt: skip


def merge_splits_reference(
    partial_out: torch.Tensor, partial_lse: torch.Tensor, unit_indptr: list[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merges in plain torch: output float64 `[batch, heads, v_head_dim]` and base-2 lse `[batch, heads]`."""
    outs, lses = [], []
    for start, stop in itertools.pairwise(unit_indptr):
        natural = partial_lse[start:stop].double() / LOG2_E
        total = natural.logsumexp(0)
        weight = (natural - total).exp().nan_to_num(0.0)  # NaN if all sums are -inf, because no query saw a key
        outs.append((partial_out[start:stop].double() * weight[..., None]).sum(0))
        lses.append(total * LOG2_E)
    return torch.stack(outs), torch.stack(lses)
