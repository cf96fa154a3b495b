"""The shipped specializations of kernels between a layer's products: norms, gated activations, rotary embedding."""

from __future__ import annotations

from quire_kernels.compilation.configurations import KernelConfiguration
from quire_kernels.ops import gated_activation, rotate_append
from quire_kernels.ops.gated_activation import gated_activation_kernel
from quire_kernels.ops.rms_norm import launch_sizes, rms_norm_kernel
from quire_kernels.ops.rotate_append import rotate_append_kernel

DTYPES = ("bf16", "fp16", "fp32")
HIDDEN = (512, 2048, 4096, 8192, 16_384)
# (query heads, KV heads, head dim, rotary dim, page size), and whether heads are normed.
HEADS = (
    ((32, 8, 128, 128, 16), False),  # Llama 3 8B
    ((32, 8, 128, 128, 16), True),  # Qwen3 8B
    ((16, 8, 256, 256, 16), True),  # Gemma 3 12B
    ((64, 8, 64, 64, 16), False),  # gpt-oss 20B
    ((32, 32, 96, 96, 1), False),  # Phi 3
    ((32, 32, 80, 32, 64), False),  # only the first part of a head is rotated
)


def _norm(dtype: str, size: int) -> KernelConfiguration:
    sizes = launch_sizes(size)
    tensors = dict.fromkeys(("x_ptr", "weight_ptr", "out_ptr"), f"*{dtype}")
    return KernelConfiguration(
        kernel=rms_norm_kernel,
        name=f"{dtype} {size}",
        signature={**tensors, "row_stride": "i32", "eps": "fp32", "offset": "fp32"},
        constexprs={name: sizes[name] for name in ("SIZE", "BLOCK")},
        aligned=frozenset((*tensors, "row_stride")),
        num_warps=sizes["num_warps"],
    )


def _activation(dtype: str, *, is_gelu: bool) -> KernelConfiguration:
    tensors = dict.fromkeys(("x_ptr", "out_ptr"), f"*{dtype}")
    sizes = dict.fromkeys(("row_stride", "size"), "i32")
    return KernelConfiguration(
        kernel=gated_activation_kernel,
        name=f"{dtype} {'gelu' if is_gelu else 'silu'}",
        signature={**tensors, **sizes},
        constexprs={"GELU": is_gelu, "BLOCK": gated_activation.BLOCK},
        aligned=frozenset((*tensors, *sizes)),
        num_warps=gated_activation.NUM_WARPS,
    )


def _turning(dtype: str, heads: tuple[int, int, int, int, int], *, is_normed: bool) -> KernelConfiguration:
    tensors = dict.fromkeys(("heads_ptr", "cosine_ptr", "sine_ptr", "k_ptr", "v_ptr"), f"*{dtype}")
    weights = dict.fromkeys(("query_weight_ptr", "key_weight_ptr"), f"*{dtype}" if is_normed else None)
    strides = {name: "i32" for name in rotate_append_kernel.arg_names if name.endswith("_stride")}
    own = {"slot_mapping_ptr": "*i64", "slot_count": "i32", "eps": "fp32", "offset": "fp32"}
    signature = {**tensors, **strides, **(dict.fromkeys(weights, f"*{dtype}") if is_normed else {})}
    return KernelConfiguration(
        kernel=rotate_append_kernel,
        name=f"{dtype} {heads[0]}/{heads[1]} D{heads[2]} R{heads[3]} P{heads[4]}{' normed' if is_normed else ''}",
        signature={**signature, **own},
        constexprs={**({} if is_normed else weights), **rotate_append.tile_sizes(*heads), "NORMED": is_normed},
        aligned=frozenset(signature),
        num_warps=rotate_append.NUM_WARPS,
    )


AROUND_PRODUCTS = (
    *(_norm(dtype, size) for dtype in DTYPES for size in HIDDEN),
    *(_activation(dtype, is_gelu=is_gelu) for dtype in DTYPES for is_gelu in (False, True)),
    *(_turning("bf16", heads, is_normed=is_normed) for heads, is_normed in HEADS),
    *(_turning(dtype, *HEADS[0][:1], is_normed=is_normed) for dtype in ("fp16", "fp32") for is_normed in (False, True)),
)
