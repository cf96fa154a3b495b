"""The common parts of both append kernels: copying one token's heads to its slot, and checking the tensors.

    cache[page, offset, head, :] = token[head, :]                            same dtype: the bits are copied
    cache[page, offset, head, :] = fp8(token[head, :] / scale[head])         fp8 cache: quantised, saturating, see `fp8`

Kernels see every tensor as integers of its element size. All dtypes without scales therefore share one code path, and
nothing is rounded. Only a quantizing append reads floating-point numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from quire_kernels.shared.fp8 import (
    FP8_BYTES,
    FP8_NAMES,
    e4m3_from_float,
    e5m2_from_float,
    is_fp8,
    quantise_reference,
)
from quire_kernels.shared.launch import device_of
from quire_kernels.shared.numbers import require_finite
from quire_kernels.shared.paged_cache import PagedCache, PagedKVCache, unpack_paged_cache

# Accepted scales: None, one number for all heads, or fp32 `[num_kv_heads]` on the cache's device.
Scale = float | torch.Tensor | None

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
QUANTISABLE = (torch.bfloat16, torch.float16, torch.float32)
TILE_ELEMENTS_MAX = 2048  # most elements that one program writes: 16 heads of 128
NUM_WARPS = 4


@triton.jit
def write_token(
    source_ptr,
    cache_ptr,
    scale_ptr,
    token,
    page,
    offset,
    source_token_stride,
    source_head_stride,
    source_element_stride,
    page_stride,
    token_stride,
    head_stride,
    element_stride,
    SCALE_STRIDE: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    QUANTISE: tl.constexpr,
):
    """Writes a block of heads of one token to its slot; program axis 1 counts the blocks.

    `token`, `page` and `offset` are int64, so that no product overflows.
    """
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    element = tl.arange(0, BLOCK_DIM)
    mask = (head < HEADS)[:, None] & (element < DIM)[None, :]
    head = head.to(tl.int64)
    element = element.to(tl.int64)
    source = source_ptr + token * source_token_stride
    source += head[:, None] * source_head_stride + element[None, :] * source_element_stride
    data = tl.load(source, mask=mask, other=0)  # [BLOCK_HEADS, BLOCK_DIM]
    if QUANTISE:
        scale = tl.load(scale_ptr + head * SCALE_STRIDE, mask=head < HEADS, other=1.0)
        data = data.to(tl.float32)
        data = tl.div_rn(data, tl.broadcast_to(scale[:, None], data.shape))
        if cache_ptr.dtype.element_ty == tl.int8:
            data = e5m2_from_float(data)
        else:
            data = e4m3_from_float(data)
    target = cache_ptr + page * page_stride + offset * token_stride
    target += head[:, None] * head_stride + element[None, :] * element_stride
    tl.store(target, data, mask=mask)


# fmt: off
@triton.jit
def write_key_and_value(
    key_ptr, value_ptr, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, token, page, offset,
    key_strides, value_strides,  # (token, head, element)
    k_strides, v_strides,  # (page, token, head, element)
    HEADS: tl.constexpr, K_DIM: tl.constexpr, V_DIM: tl.constexpr,
    BLOCK_HEADS: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    K_SCALE_STRIDE: tl.constexpr, V_SCALE_STRIDE: tl.constexpr, QUANTISE: tl.constexpr,
):
    """Writes the key and the value of a token to its slot."""
    write_token(
        key_ptr, k_ptr, k_scale_ptr, token, page, offset, key_strides[0], key_strides[1], key_strides[2],
        k_strides[0], k_strides[1], k_strides[2], k_strides[3],
        K_SCALE_STRIDE, HEADS, K_DIM, BLOCK_HEADS, BLOCK_K, QUANTISE,
    )
    write_token(
        value_ptr, v_ptr, v_scale_ptr, token, page, offset, value_strides[0], value_strides[1], value_strides[2],
        v_strides[0], v_strides[1], v_strides[2], v_strides[3],
        V_SCALE_STRIDE, HEADS, V_DIM, BLOCK_HEADS, BLOCK_V, QUANTISE,
    )
# fmt: on


@dataclass(frozen=True, slots=True, eq=False)
class Append:
    """Tensors of one append, checked, and viewed in the form that kernels take.

    `views`, `strides` and `sizes` are kernel arguments, in the order of the kernels' signatures.
    """

    cache: PagedCache
    token_count: int
    views: tuple[torch.Tensor | None, ...]  # key, value, k cache, v cache, k scale, v scale
    strides: tuple[int, ...]  # strides of the first four views: 3 for key, 3 for value, 4 for each cache
    sizes: dict[str, Any]  # constexprs

    @property
    def head_block_count(self) -> int:
        """Counts how many programs write one token."""
        return triton.cdiv(self.cache.num_kv_heads, self.sizes["BLOCK_HEADS"])

    def launch(self, kernel: Any, *places: Any) -> None:
        """Runs a kernel over all tokens; `places` are the kernel arguments with each token's destination."""
        if self.token_count == 0:
            return
        with device_of(kernel, paged_kv_cache=self.cache.k):
            kernel[(self.token_count, self.head_block_count)](
                *self.views, *places, *self.strides, **self.sizes, num_warps=NUM_WARPS
            )


def prepare(
    append_key: torch.Tensor,
    append_value: torch.Tensor,
    paged_kv_cache: PagedKVCache,
    kv_layout: str,
    k_scale: Scale,
    v_scale: Scale,
) -> Append:
    """Checks the arguments, as far as that needs no wait for the device.

    Args:
        append_key: `[tokens, num_kv_heads, head_dim]`, any strides; of the cache's dtype, or bf16, fp16 or fp32 if the
            cache is float8_e4m3fn or float8_e5m2.
        append_value: as `append_key`, with the head dim of values.
        paged_kv_cache: see `quire_kernels.shared.paged_cache`.
        kv_layout: "NHD" or "HND".
        k_scale: only for an fp8 cache, which stores `append_key / k_scale`.
        v_scale: as `k_scale`, for values.

    Raises:
        ValueError: shape, dtype, device or layout do not fit, or a scale is not a positive number. The message names
            the argument.
    """
    cache = unpack_paged_cache(paged_kv_cache, kv_layout)
    _check_source("append_key", append_key, cache, cache.head_dim)
    _check_source("append_value", append_value, cache, cache.v_head_dim)
    if append_key.shape[0] != append_value.shape[0] or append_key.dtype != append_value.dtype:
        raise ValueError(
            f"append_value is {append_value.dtype} {tuple(append_value.shape)}, but append_key is "
            f"{append_key.dtype} {tuple(append_key.shape)}"
        )
    quantise = is_fp8(cache.dtype) and append_key.dtype in QUANTISABLE
    for name, given in (("k_scale", k_scale), ("v_scale", v_scale)):
        if given is not None and not quantise:
            raise ValueError(
                f"{name} needs an fp8 cache and keys in another dtype, not a cache of {cache.dtype} and keys of "
                f"{append_key.dtype}"
            )
    sources = [append_key, append_value]
    scales: tuple[torch.Tensor | None, ...] = (None, None)
    scale_strides = {"K_SCALE_STRIDE": 0, "V_SCALE_STRIDE": 0}
    if quantise:
        k_scales, v_scales = _scale_tensor("k_scale", k_scale, cache), _scale_tensor("v_scale", v_scale, cache)
        scales = (k_scales, v_scales)
        scale_strides = {"K_SCALE_STRIDE": k_scales.stride(0), "V_SCALE_STRIDE": v_scales.stride(0)}
    else:
        sources = [_as_integers(source) for source in sources]
    as_bytes = FP8_BYTES[cache.dtype] if quantise else INTEGERS[cache.dtype.itemsize]
    caches = [cache.k.view(as_bytes), cache.v.view(as_bytes)]
    strides = [stride for view in (*sources, *caches) for stride in view.stride()]
    sizes = tile_sizes(cache.num_kv_heads, cache.head_dim, cache.v_head_dim)
    return Append(
        cache=cache,
        token_count=append_key.shape[0],
        views=(*sources, *caches, *scales),
        strides=tuple(strides),
        sizes={"PAGE_SIZE": cache.page_size, **sizes, **scale_strides, "QUANTISE": quantise},
    )


def tile_sizes(num_kv_heads: int, head_dim: int, v_head_dim: int) -> dict[str, Any]:
    """Returns the constexprs that size a program's work: at most `TILE_ELEMENTS_MAX` elements, but at least a head."""
    block_k, block_v = triton.next_power_of_2(head_dim), triton.next_power_of_2(v_head_dim)
    fitting = max(1, TILE_ELEMENTS_MAX // max(block_k, block_v))
    return {
        "HEADS": num_kv_heads,
        "K_DIM": head_dim,
        "V_DIM": v_head_dim,
        "BLOCK_HEADS": min(triton.next_power_of_2(num_kv_heads), fitting),
        "BLOCK_K": block_k,
        "BLOCK_V": block_v,
    }


def store_reference(
    append_key: torch.Tensor,
    append_value: torch.Tensor,
    slots: list[tuple[int, int] | None],
    cache: PagedCache,
    k_scale: Scale,
    v_scale: Scale,
) -> None:
    """Writes each token to its (page, offset in the page) in plain torch; skips tokens with slot None."""
    for source, pages, scale in ((append_key, cache.k, k_scale), (append_value, cache.v, v_scale)):
        data = source
        if is_fp8(cache.dtype) and source.dtype in QUANTISABLE:
            factor = torch.as_tensor(1.0 if scale is None else scale, dtype=torch.float32, device=source.device)
            data = quantise_reference(source, factor.reshape(-1, 1), cache.dtype)
        stored, written = _as_integers(pages), _as_integers(data)
        for token, slot in enumerate(slots):
            if slot is not None:
                stored[slot[0], slot[1]] = written[token]


def _as_integers(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(INTEGERS[tensor.dtype.itemsize])


def _check_source(name: str, source: torch.Tensor, cache: PagedCache, head_dim: int) -> None:
    if source.dim() != 3 or source.shape[1:] != (cache.num_kv_heads, head_dim):
        raise ValueError(f"{name} must be [tokens, {cache.num_kv_heads}, {head_dim}], not {tuple(source.shape)}")
    if source.dtype != cache.dtype and not (is_fp8(cache.dtype) and source.dtype in QUANTISABLE):
        raise ValueError(
            f"{name} is {source.dtype}, but the cache is {cache.dtype}: they must be equal, or the cache "
            f"{FP8_NAMES} and the keys float16, bfloat16 or float32"
        )
    if source.device != cache.device:
        raise ValueError(f"{name} must be on the cache's device, {cache.device}, not {source.device}")


def _scale_tensor(name: str, scale: Scale, cache: PagedCache) -> torch.Tensor:
    """Returns a scale as fp32 `[num_kv_heads]`; a number for all heads is expanded with stride 0."""
    if not isinstance(scale, torch.Tensor):
        value = 1.0 if scale is None else require_finite(name, scale)
        if value <= 0:
            raise ValueError(f"{name} must be a positive number, not {scale!r}")
        return torch.full((1,), value, dtype=torch.float32, device=cache.device).expand(cache.num_kv_heads)
    if scale.dtype != torch.float32 or scale.device != cache.device:
        raise ValueError(f"{name} must be float32 on {cache.device}, not {scale.dtype} on {scale.device}")
    if scale.shape not in ((1,), (cache.num_kv_heads,)):
        raise ValueError(f"{name} must be [{cache.num_kv_heads}] or [1], not {tuple(scale.shape)}")
    return scale.expand(cache.num_kv_heads) if scale.shape[0] == 1 else scale
