"""What ships of the kernels in Gluon, for Hopper alone."""

from __future__ import annotations

from quire_kernels.compilation.configurations import KernelConfiguration
from quire_kernels.ops import mla_hopper

LAYOUT = "NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)"


def _latent(dtype: str, heads: int, page_size: int) -> KernelConfiguration:
    kernel, rows = mla_hopper.mla_hopper_kernel, min(page_size, mla_hopper.KEYS)
    strides = [name for name in kernel.arg_names if name.startswith("stride_")]
    boxes = {"ckv": mla_hopper.CKV_DIM // 2, "kpe": mla_hopper.KPE_DIM}
    indices = ("qo_indptr", "page_indptr", "page_indices", "units", "unit_indptr")
    return KernelConfiguration(
        kernel=kernel,
        name=f"{dtype} H{heads} P{page_size} decode",
        signature={
            **dict.fromkeys(("q_nope", "q_pe", "out"), f"*{dtype}"),
            **{name: f"tensordesc<{dtype}[{rows},{columns}],{LAYOUT}>" for name, columns in boxes.items()},
            **dict.fromkeys(indices, "*i32"),
            **dict.fromkeys(("lse", "partial_out", "partial_lse"), "*fp32"),
            "sm_scale": "fp32",
            **dict.fromkeys(("batch", *strides), "i32"),
        },
        constexprs={
            "HEADS": heads,
            "PAGE_SIZE": page_size,
            "BLOCK": mla_hopper.HEADS,
            "KEYS": mla_hopper.KEYS,
            "COPY_REGISTERS": mla_hopper.COPY_REGISTERS,
            "GROUP_REGISTERS": mla_hopper.GROUP_REGISTERS,
        },
        aligned=frozenset({"q_nope", "q_pe", "out", "partial_out", *strides}),
        num_warps=mla_hopper.NUM_WARPS,
        registers_max=mla_hopper.REGISTERS,
        architectures=("sm_90",),
    )


HOPPER = (
    *(_latent("bf16", heads, page_size) for heads in (128, 80) for page_size in (16, 64)),
    _latent("fp16", 128, 64),
)
