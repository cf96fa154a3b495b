"""Chooses the latent decode kernel for Hopper by QUIRE_LATENT_VARIANT, for one measurement: the slower ones will go."""

from __future__ import annotations

import os
from typing import Any

import torch
import triton
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from quire_kernels.ops import mla_hopper
from quire_kernels.ops.mla_early import mla_early_kernel
from quire_kernels.ops.mla_hopper import (
    CKV_DIM,
    COPY_REGISTERS,
    GROUP_REGISTERS,
    HEADS,
    KEYS,
    KPE_DIM,
    NUM_WARPS,
    REGISTERS,
    describe,
)
from quire_kernels.ops.mla_persistent import mla_persistent_kernel
from quire_kernels.shared.launch import multiprocessor_count
from quire_kernels.shared.mla_work import MlaWork

VARIANT = "QUIRE_LATENT_VARIANT"  # unset, "early", or a key of PIECES
PIECES = {"persistent": 1, "pieces": 4}  # that half the dims of a tile are copied in by programs that stay


def launch_hopper(
    parts: dict[str, torch.Tensor],
    indices: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    division: MlaWork,
    out: torch.Tensor,
    lse: torch.Tensor,
    sm_scale: float,
) -> None:
    """Takes what `mla_hopper.launch_hopper` takes."""
    variant = os.environ.get(VARIANT, "")
    q_nope, q_pe, ckv, kpe = parts.values()
    heads = q_nope.shape[1]
    programs = division.work.capacity * triton.cdiv(heads, HEADS)
    caches = (describe(ckv, CKV_DIM // 2 // PIECES.get(variant, 1)), describe(kpe, KPE_DIM))
    work = (*indices, division.work.units, division.work.indptr)
    results = (out, lse, division.partial_out, division.partial_lse)
    sizes = {
        "HEADS": heads, "PAGE_SIZE": ckv.shape[1], "BLOCK": HEADS, "KEYS": KEYS, "COPY_REGISTERS": COPY_REGISTERS,
        "GROUP_REGISTERS": GROUP_REGISTERS, "num_warps": NUM_WARPS, "maxnreg": REGISTERS,
    }  # fmt: skip
    if variant == "early":
        kernel: Any = mla_early_kernel  # not by its name: it does not ship
        kernel[(programs,)](
            q_nope, q_pe, *caches, *work, *results, float(sm_scale), division.work.batch, *q_nope.stride()[:2],
            *q_pe.stride()[:2], **sizes,
        )  # fmt: skip
    elif variant in PIECES and all(is_copyable(part) for part in (q_nope, q_pe)):
        kernel = mla_persistent_kernel
        kernel[(min(programs, multiprocessor_count(q_nope.device)),)](
            describe_queries(q_nope, CKV_DIM // 2), describe_queries(q_pe, KPE_DIM), *caches, *work, *results,
            float(sm_scale), division.work.batch, PIECES=PIECES[variant], **sizes,
        )  # fmt: skip
    else:
        mla_hopper.launch_hopper(parts, indices, division, out, lse, sm_scale)


def is_copyable(queries: torch.Tensor) -> bool:
    """Says whether TMA can copy blocks of heads: they are aligned."""
    return queries.data_ptr() % 16 == 0 and all(stride * 2 % 16 == 0 for stride in queries.stride()[:2])


def describe_queries(queries: torch.Tensor, columns: int) -> TensorDescriptor:
    """Describes queries `[tokens, heads, dim]`; a box is a block of heads of a token, zeros past the last head."""
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=3)
    return TensorDescriptor(queries, list(queries.shape), list(queries.stride()), [1, HEADS, columns], layout)
