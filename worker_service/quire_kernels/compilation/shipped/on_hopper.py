"""The shipped specializations of the Gluon kernels, only for compute capability 9."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from quire_kernels.compilation.configurations import KernelConfiguration
from quire_kernels.ops import mla_hopper
from quire_kernels.ops.prefill_hopper import BLOCK_N, MAXNREG, STAGES, prefill_hopper_kernel
from quire_kernels.shared.tma_pages import PAGE_LAYOUT

PROGRAMS = 132  # multiprocessors of an H100 or H200
KV_HEADS = 8


def _prefill(
    head_dim: int = 128, *, dtype: str = "bf16", group: int = 4, page_size: int = 16, causal: bool = True,
    options: bool = False,
) -> KernelConfiguration:  # fmt: skip
    signature = {
        **dict.fromkeys(("q", "out"), f"*{dtype}"),
        **dict.fromkeys(("k", "v"), f"tensordesc<{dtype}[{min(page_size, BLOCK_N)}, {head_dim}],{PAGE_LAYOUT!r}>"),
        **dict.fromkeys(
            ("qo_indptr", "page_indptr", "page_indices", "last_page_len", "units", "unit_indptr", "taken"),
            "*i32",
        ),
        **dict.fromkeys(("lse", *(("sinks",) if options else ())), "*fp32"),
        **dict.fromkeys(("scale", "cap"), "fp32"),
        **dict.fromkeys(
            ("window_left", "batch", "rows_per_page", "rows_per_head", "columns_per_head",
             "stride_q_token", "stride_q_head"),
            "i32",
        ),
    }  # fmt: skip
    title = [dtype, f"D{head_dim}", f"G{group}", f"P{page_size}", *(["options"] if options else [])]
    return KernelConfiguration(
        kernel=prefill_hopper_kernel,
        name=" ".join(title if causal else [*title, "not causal"]),
        signature=signature,
        constexprs={
            **({} if options else {"sinks": None}),
            "PROGRAMS": PROGRAMS,
            "KV_HEADS": KV_HEADS,
            "GROUP": group,
            "PAGE_SIZE": page_size,
            "HEAD_DIM": head_dim,
            "BLOCK_N": BLOCK_N,
            "STAGES": STAGES,
            "CAUSAL": causal,
            "WINDOW": options,
            "SOFT_CAP": options,
        },
        aligned=frozenset({"q", "out", "stride_q_token", "stride_q_head"}),
        num_stages=STAGES,
        architectures=("sm_90",),
        maxnreg=MAXNREG,
    )


def _prefills() -> Iterator[KernelConfiguration]:
    """Yields head dims with and without options, pages of 64, ratios of heads, float16, and prefill without a mask."""
    for head_dim, options in itertools.product((64, 128), (False, True)):
        yield _prefill(head_dim, options=options)
    yield _prefill(page_size=64)
    for group in (5, 7):
        yield _prefill(group=group)
    yield _prefill(dtype="fp16")
    yield _prefill(causal=False)


def _latent(dtype: str, heads: int, page_size: int) -> KernelConfiguration:
    kernel = mla_hopper.mla_hopper_kernel
    rows = min(page_size, mla_hopper.KEYS)
    boxes = {
        "q_nope": [1, mla_hopper.HEADS, mla_hopper.CKV_DIM // 2],
        "q_pe": [1, mla_hopper.HEADS, mla_hopper.KPE_DIM],
        "ckv": [rows, mla_hopper.CKV_DIM // 2 // mla_hopper.PIECES],
        "kpe": [rows, mla_hopper.KPE_DIM],
    }
    indices = ("qo_indptr", "page_indptr", "page_indices", "units", "unit_indptr")
    return KernelConfiguration(
        kernel=kernel,
        name=f"{dtype} H{heads} P{page_size}",
        signature={
            "out": f"*{dtype}",
            **{name: f"tensordesc<{dtype}{box},{mla_hopper.LAYOUTS[len(box)]!r}>" for name, box in boxes.items()},
            **dict.fromkeys(indices, "*i32"),
            **dict.fromkeys(("lse", "partial_out", "partial_lse"), "*fp32"),
            "sm_scale": "fp32",
            "batch": "i32",
        },
        constexprs={
            "HEADS": heads,
            "PAGE_SIZE": page_size,
            "BLOCK": mla_hopper.HEADS,
            "KEYS": mla_hopper.KEYS,
            "PIECES": mla_hopper.PIECES,
            "COPY_REGISTERS": mla_hopper.COPY_REGISTERS,
            "GROUP_REGISTERS": mla_hopper.GROUP_REGISTERS,
        },
        aligned=frozenset({"out", "partial_out"}),
        num_warps=mla_hopper.NUM_WARPS,
        maxnreg=mla_hopper.REGISTERS,
        has_products_in_flight=False,  # While one group multiplies, the other group computes exponentials.
        architectures=("sm_90",),
    )


ON_HOPPER = (
    *_prefills(),
    *(_latent("bf16", heads, page_size) for heads in (80, 128) for page_size in (16, 64)),
    _latent("fp16", 128, 64),
)
