"""The shipped specializations of the kernels that append, for common head dims."""

from __future__ import annotations

from typing import Any

from quire_kernels.compilation.configurations import KernelConfiguration
from quire_kernels.ops.append_paged_kv_cache import append_kernel
from quire_kernels.ops.append_slots import append_slots_kernel
from quire_kernels.shared.append_token import NUM_WARPS, tile_sizes

DIMS = (64, 80, 96, 128, 256)
# (dtype of tokens, dtype of cache) -> head dims. With equal dtypes, the kernel copies elements as integers of the same
# size. With float tokens, the kernel quantizes them to fp8: u8 means e4m3, and i8 means e5m2.
HEAD_DIMS = {
    ("i16", "i16"): DIMS,
    ("bf16", "u8"): DIMS,
    ("bf16", "i8"): DIMS,
    ("fp16", "u8"): (128,),
    ("fp16", "i8"): (128,),
    ("fp32", "u8"): (128,),
    ("fp32", "i8"): (128,),
    ("u8", "u8"): (128,),
    ("i32", "i32"): (64, 128, 256),
}
FORMATS = {"u8": "e4m3", "i8": "e5m2"}
# For each kernel: the types of the arguments that the other kernel lacks.
PLACES = {
    append_kernel: {
        **dict.fromkeys(("batch_indices_ptr", "positions_ptr", "kv_indices_ptr", "kv_indptr_ptr"), "*i32"),
        **dict.fromkeys(("batch_size", "page_count"), "i32"),
    },
    append_slots_kernel: {"slot_mapping_ptr": "*i64", "slot_count": "i32"},
}


def _configuration(kernel: Any, element: str, cache_element: str, head_dim: int) -> KernelConfiguration:
    quantise = element != cache_element
    scales = ("k_scale_ptr", "v_scale_ptr")
    strides = [name for name in kernel.arg_names if name.endswith("_stride")]
    signature = {
        **dict.fromkeys(("key_ptr", "value_ptr"), f"*{element}"),
        **dict.fromkeys(("k_ptr", "v_ptr"), f"*{cache_element}"),
        **(dict.fromkeys(scales, "*fp32") if quantise else {}),
        **dict.fromkeys((stride for stride in strides if "element" not in stride), "i32"),
    }
    constexprs = {
        **({} if quantise else dict.fromkeys(scales)),
        **dict.fromkeys((stride for stride in strides if "element" in stride), 1),
        "PAGE_SIZE": 16,
        **tile_sizes(8, head_dim, head_dim),
        **dict.fromkeys(("K_SCALE_STRIDE", "V_SCALE_STRIDE"), int(quantise)),
        "QUANTISE": quantise,
    }
    return KernelConfiguration(
        kernel=kernel,
        name=f"{element} to {FORMATS[cache_element] if quantise else cache_element} D{head_dim}",
        signature={**signature, **PLACES[kernel]},
        constexprs=constexprs,
        aligned=frozenset(signature),
        num_warps=NUM_WARPS,
    )


APPENDING = tuple(
    _configuration(kernel, element, cache_element, head_dim)
    for kernel in PLACES
    for (element, cache_element), head_dims in HEAD_DIMS.items()
    for head_dim in head_dims
)
