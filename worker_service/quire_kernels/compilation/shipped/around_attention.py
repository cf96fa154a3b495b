"""The shipped specializations of kernels around attention: dividing work, packing masks, merging, sampling."""

from __future__ import annotations

from typing import Any

import triton

from quire_kernels.compilation.configurations import ARCHITECTURES, KernelConfiguration
from quire_kernels.ops import merge_splits, merge_states, pack_mask, sampling
from quire_kernels.ops.merge_splits import merge_splits_kernel
from quire_kernels.ops.merge_states import merge_state_kernel, merge_states_kernel
from quire_kernels.ops.pack_mask import segment_packbits_kernel
from quire_kernels.ops.sampling import sample_kernel
from quire_kernels.shared import work_units
from quire_kernels.shared.work_units import divide_work_kernel


def _splits(chip: str, dtype: str, v_head_dim: int) -> KernelConfiguration:
    block_v = triton.next_power_of_2(v_head_dim)
    return KernelConfiguration(
        kernel=merge_splits_kernel,
        name=f"{chip} {dtype} V{v_head_dim}",
        signature={
            **dict.fromkeys(("partial_out", "partial_lse", "lse"), "*fp32"),
            "unit_indptr": "*i32",
            "out": f"*{dtype}",
            **dict.fromkeys(("heads", "heads_per_program", "stride_out_token", "stride_out_head"), "i32"),
        },
        constexprs={
            "stride_out_dim": 1,
            "V_DIM": v_head_dim,
            "BLOCK_V": block_v,
            "BLOCK_SPLITS": merge_splits.block_splits(block_v),
            "OVERLAP": chip == "sm_90",
        },
        aligned=frozenset({"partial_out", "out", "stride_out_token", "stride_out_head"}),
        num_warps=merge_splits.NUM_WARPS,
        architectures=(chip,),
    )


def _states(dtype: str, dim: int) -> KernelConfiguration:
    strides = [name for name in merge_states_kernel.arg_names if name.endswith("_stride")]
    of_one = ("v_element_stride", "s_head_stride")
    aligned = {
        **dict.fromkeys(("v_ptr", "v_out_ptr"), f"*{dtype}"),
        **dict.fromkeys(("s_ptr", "s_out_ptr"), "*fp32"),
        **dict.fromkeys((stride for stride in strides if stride not in of_one), "i32"),
    }
    return KernelConfiguration(
        kernel=merge_states_kernel,
        name=f"{dtype} D{dim}",
        signature={**aligned, "state_count": "i32"},
        constexprs={**merge_states.tile_sizes(32, dim), **dict.fromkeys(of_one, 1)},
        aligned=frozenset(aligned),
        num_warps=merge_states.NUM_WARPS,
    )


def _two_states(dtype: str, dim: int, *, masked: bool = False) -> KernelConfiguration:
    aligned = {
        **dict.fromkeys(("v_a_ptr", "v_b_ptr", "v_out_ptr"), f"*{dtype}"),
        **dict.fromkeys(("s_a_ptr", "s_b_ptr", "s_out_ptr"), "*fp32"),
    }
    constexprs: dict[str, Any] = merge_states.tile_sizes(32, dim)
    return KernelConfiguration(
        kernel=merge_state_kernel,
        name=f"{dtype} D{dim}{' masked' if masked else ''}",
        signature={**aligned, **({"mask_ptr": "*u8"} if masked else {})},
        constexprs=constexprs | ({} if masked else {"mask_ptr": None}),
        aligned=frozenset(aligned),
        num_warps=merge_states.NUM_WARPS,
    )


def _packing(*, is_little: bool) -> KernelConfiguration:
    return KernelConfiguration(
        kernel=segment_packbits_kernel,
        name="little" if is_little else "big",
        signature={
            **dict.fromkeys(("x_ptr", "packed_ptr"), "*u8"),
            **dict.fromkeys(("input_indptr_ptr", "output_indptr_ptr"), "*i64"),
        },
        constexprs={"BLOCK_BYTES": pack_mask.BLOCK_BYTES, "IS_LITTLE": is_little},
        aligned=frozenset(("x_ptr", "packed_ptr")),
        num_warps=pack_mask.NUM_WARPS,
    )


def _sampling(dtype: str, *, is_greedy: bool) -> KernelConfiguration:
    vectors = {
        **dict.fromkeys(("uniform_ptr", "temperature_ptr", "top_p_ptr", "min_p_ptr"), "*fp32"),
        "top_k_ptr": "*i32",
    }
    aligned = {"logits_ptr": f"*{dtype}", "token_ptr": "*i32"}
    blocks = {"BLOCK": sampling.BLOCK, "DRAW_BLOCK": sampling.DRAW_BLOCK}
    constexprs = {"stride": 1, **blocks, "GREEDY": is_greedy, **(dict.fromkeys(vectors) if is_greedy else {})}
    return KernelConfiguration(
        kernel=sample_kernel,
        name=f"{dtype}{' greedy' if is_greedy else ''}",
        signature={**aligned, **({} if is_greedy else vectors), "vocabulary": "i32", "row_stride": "i32"},
        constexprs=constexprs,
        aligned=frozenset(aligned),
        num_warps=sampling.NUM_WARPS,
    )


DIVISION = KernelConfiguration(
    kernel=divide_work_kernel,
    name="of any batch",
    signature={
        **dict.fromkeys(("first", "last", "units", "indptr"), "*i32"),
        **dict.fromkeys(("batch", "unit_target", "capacity", "size_min", "alignment", "units_min"), "i32"),
    },
    constexprs={"BLOCK": work_units.BLOCK},
    num_warps=4,
)
STATE_DIMS = {"bf16": (64, 80, 96, 128, 256, 512), "fp16": (128, 512), "fp32": (64, 128, 256, 512)}

AROUND_ATTENTION = (
    DIVISION,
    *(
        _splits(chip, dtype, v_head_dim)
        for chip in ARCHITECTURES
        for dtype in ("bf16", "fp16", "fp32")
        for v_head_dim in (64, 96, 128, 256, 512)
    ),
    *(_states(dtype, dim) for dtype, dims in STATE_DIMS.items() for dim in dims),
    *(_two_states(dtype, dim) for dtype in ("bf16", "fp32") for dim in (64, 128, 256, 512)),
    _two_states("fp16", 128),
    _two_states("bf16", 128, masked=True),
    *(_packing(is_little=is_little) for is_little in (True, False)),
    *(_sampling(dtype, is_greedy=is_greedy) for dtype in sampling.DTYPES.values() for is_greedy in (False, True)),
)
