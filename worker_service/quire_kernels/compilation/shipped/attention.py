"""The shipped specializations of the attention kernels; each chip has its own tile sizes and fp8 types."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial
from typing import Any

from quire_kernels.compilation.configurations import ARCHITECTURES, ELEMENT_BYTES, FP8_TYPES, KernelConfiguration
from quire_kernels.ops.decode_paged import decode_paged_kernel
from quire_kernels.ops.mla_paged import mla_paged_kernel
from quire_kernels.ops.prefill_attention import prefill_kernel
from quire_kernels.shared.decode_work import decode_tiling
from quire_kernels.shared.launch import head_dim_blocks
from quire_kernels.shared.mla_work import mla_tiling
from quire_kernels.shared.prefill_rows import prefill_tiling

OPTIONS = ("sinks", "slopes", "k_scale", "v_scale")  # optional tensors of a launch
ONES = ("stride_q_dim", "stride_k_dim", "stride_v_dim")
KV_HEADS = 8  # a common number; tile sizes do not depend on the number of KV heads
USUAL, WIDE, LATENT = (128, 128), (256, 256), (192, 128)  # head dims of keys and of values


def runtime_strides(kernel: Any) -> list[str]:
    """Returns the strides that are run-time arguments; strides of the head dim are 1, a compile-time constant."""
    return [name for name in kernel.arg_names if name.startswith("stride_") and not name.endswith("_dim")]


def _present(options: bool, cache: str) -> tuple[str, ...]:
    """Returns the optional tensors of a launch: all of them, or only the scales of an fp8 cache."""
    return OPTIONS if options else OPTIONS[2:] if ELEMENT_BYTES[cache] == 1 else ()


def _decode(
    chip: str, dtype: str, cache: str, dims: tuple[int, int], *, group: int = 4, page_size: int = 16,
    options: bool = False,
) -> KernelConfiguration:  # fmt: skip
    tiling = decode_tiling(chip, group, *dims, ELEMENT_BYTES[dtype], is_fp8=ELEMENT_BYTES[cache] == 1)
    strides = runtime_strides(decode_paged_kernel)
    signature = {
        **dict.fromkeys(("q", "out"), f"*{dtype}"),
        **dict.fromkeys(("k", "v"), f"*{cache}"),
        **dict.fromkeys(("page_indptr", "page_indices", "last_page_len", "units", "unit_indptr"), "*i32"),
        **dict.fromkeys(("lse", "partial_out", "partial_lse", *_present(options, cache)), "*fp32"),
        **dict.fromkeys(("sm_scale", "soft_cap"), "fp32"),
        **dict.fromkeys(("window_left", "batch", *strides), "i32"),
    }
    title = (f"D{dims[0]}", f"V{dims[1]}", f"G{group}", f"P{page_size}")
    return KernelConfiguration(
        kernel=decode_paged_kernel,
        name=" ".join([chip, dtype, "cache", cache, *title, *(["options"] if options else [])]),
        signature=signature,
        constexprs={
            **{name: None for name in OPTIONS if name not in signature},
            **dict.fromkeys(ONES, 1),
            "KV_HEADS": KV_HEADS,
            "GROUP": group,
            "PAGE_SIZE": page_size,
            "BLOCK_M": tiling.block_m,
            "BLOCK_N": tiling.block_n,
            "WINDOW": options,
            "SOFT_CAP": options,
            "UPCAST": False,
            "OVERLAP": chip == "sm_90",
            **head_dim_blocks(*dims),
        },
        aligned=frozenset({"q", "k", "v", "out", "partial_out", *strides}),
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
        architectures=(chip,),
    )


def _decodes(chip: str) -> Iterator[KernelConfiguration]:
    """Yields decode for models' head dims, head ratios, page sizes and dtypes, and each tiling with all options."""
    for dims in ((64, 64), (80, 80), (96, 96), USUAL, WIDE, LATENT):
        yield _decode(chip, "bf16", "bf16", dims)
    for group in (1, 5, 7, 8, 16, 32, 64):
        yield _decode(chip, "bf16", "bf16", USUAL, group=group)
    for page_size in (1, 64):
        yield _decode(chip, "bf16", "bf16", USUAL, page_size=page_size)
    for fp8 in FP8_TYPES[chip]:
        yield _decode(chip, "bf16", fp8, USUAL, group=8)
    for dtype, options in itertools.product(("fp16", "fp32"), (False, True)):
        yield _decode(chip, dtype, dtype, USUAL, options=options)
    tilings = set()
    for dtype in ("bf16", "fp32"):
        for cache, dims, group in itertools.product((dtype, *FP8_TYPES[chip]), (WIDE, LATENT, USUAL), (4, 32, 64)):
            found = _decode(chip, dtype, cache, dims, group=group, options=True)
            tiling = (dtype, cache, found.constexprs["BLOCK_M"], found.constexprs["BLOCK_N"], found.num_warps)
            if tiling not in tilings:
                tilings.add(tiling)
                yield found


def _prefill(
    chip: str, dtype: str = "bf16", cache: str | None = None, dims: tuple[int, int] = USUAL, *,
    group: int = 4, page_size: int = 16, rows: int = 1024, options: bool = False, mask: int = 0, causal: bool = True,
) -> KernelConfiguration:  # fmt: skip
    """Describes a launch of prefill.

    `page_size` is 0 without pages. `rows` is the number of query rows per request. `mask` is a mask kind of `tile`, and
    replaces `causal`.
    """
    cache = cache or dtype
    is_fp8 = ELEMENT_BYTES[cache] == 1
    tiling = prefill_tiling(chip, rows, *dims, ELEMENT_BYTES[dtype], masked=mask > 0, is_fp8=is_fp8)
    of_pages = ("page_indices", "last_page_len", "stride_k_page", "stride_v_page")  # All are None without pages.
    strides = [name for name in runtime_strides(prefill_kernel) if page_size or name not in of_pages]
    indices = ("kv_indptr", *(of_pages[:2] if page_size else ()))
    signature = {
        **dict.fromkeys(("q", "out"), f"*{dtype}"),
        **dict.fromkeys(("k", "v"), f"*{cache}"),
        **dict.fromkeys(("units", "unit_indptr", "qo_indptr", *indices), "*i32"),
        **dict.fromkeys(("lse", *_present(options, cache)), "*fp32"),
        **dict.fromkeys(("sm_scale", "soft_cap"), "fp32"),
        **dict.fromkeys(("window_left", "chunk_size", "batch", *strides), "i32"),
        **({"mask": "*u8", "mask_indptr": "*i64"} if mask else {}),
    }
    title = [chip, dtype, f"cache {cache}", f"D{dims[0]} V{dims[1]}", f"G{group}", f"M{tiling.block_m}"]
    title += [f"P{page_size}"] if page_size else []
    title += ["options"] if options else []
    title += [f"mask {mask}"] if mask else [] if causal else ["not causal"]
    return KernelConfiguration(
        kernel=prefill_kernel,
        name=" ".join(title),
        signature=signature,
        constexprs={
            **{name: None for name in (*OPTIONS, *of_pages, "mask", "mask_indptr") if name not in signature},
            **dict.fromkeys(ONES, 1),
            "KV_HEADS": KV_HEADS,
            "GROUP": group,
            "PAGE_SIZE": page_size,
            **head_dim_blocks(*dims),
            "BLOCK_M": tiling.block_m,
            "BLOCK_N": tiling.block_n,
            "CAUSAL": causal and not mask,
            "CHUNKED": options,
            "MASK_KIND": mask,
            "WINDOW": options,
            "SOFT_CAP": options,
            "UPCAST": False,
        },
        aligned=frozenset({"q", "k", "v", "out", *strides}),
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
        architectures=(chip,),
    )


def _paged_prefills(chip: str) -> Iterator[KernelConfiguration]:
    """Yields prefill over pages for the same cases as `_decodes`, and with masks."""
    for dims in ((64, 64), (80, 80), (96, 96), USUAL, WIDE, LATENT):
        yield _prefill(chip, dims=dims)
    for group in (5, 7):
        yield _prefill(chip, group=group)
    for rows in (16, 64):
        yield _prefill(chip, rows=rows)
    for page_size in (1, 64):
        yield _prefill(chip, page_size=page_size)
    for mask in (1, 2):
        yield _prefill(chip, mask=mask)
    yield _prefill(chip, causal=False)
    for fp8 in FP8_TYPES[chip]:
        yield _prefill(chip, cache=fp8)
    for dtype, options in itertools.product(("fp16", "fp32"), (False, True)):
        yield _prefill(chip, dtype, options=options)
    tilings = set()
    for dtype, mask in itertools.product(("bf16", "fp32"), (0, 2)):
        for cache, dims, rows in itertools.product((dtype, *FP8_TYPES[chip]), (WIDE, LATENT, USUAL), (16, 64, 128)):
            is_fp8 = cache != dtype
            tiling = prefill_tiling(chip, rows, *dims, ELEMENT_BYTES[dtype], masked=mask > 0, is_fp8=is_fp8)
            if (dtype, mask, cache, tiling) not in tilings:
                tilings.add((dtype, mask, cache, tiling))
                yield _prefill(chip, dtype, cache, dims, rows=rows, mask=mask, options=True)


def _ragged_prefills(chip: str) -> Iterator[KernelConfiguration]:
    """Yields fewer cases than for paged prefill: the inner loop is the same, and uses fewer registers without pages."""
    prefill = partial(_prefill, page_size=0)
    for dims in ((64, 64), (80, 80), (96, 96), USUAL, WIDE):
        yield prefill(chip, dims=dims)
    yield prefill(chip, dims=LATENT, group=1)
    for group in (5, 7):
        yield prefill(chip, group=group)
    yield prefill(chip, mask=2)
    yield prefill(chip, causal=False)
    for fp8 in FP8_TYPES[chip]:
        yield prefill(chip, cache=fp8)
    for dtype, options in itertools.product(("fp16", "fp32"), (False, True)):
        yield prefill(chip, dtype, options=options)
    yield prefill(chip, dims=WIDE, options=True)


def _latent(chip: str, dtype: str, heads: int, page_size: int, *, split_keys: bool) -> KernelConfiguration:
    tiling = mla_tiling(chip, heads, ELEMENT_BYTES[dtype])
    strides = runtime_strides(mla_paged_kernel)
    partial = ("partial_out", "partial_lse")
    signature = {
        **dict.fromkeys(("q_nope", "q_pe", "ckv", "kpe", "out"), f"*{dtype}"),
        **dict.fromkeys(
            ("qo_indptr", "page_indptr", "page_indices", "kv_lengths", "units", "unit_indptr"),
            "*i32",
        ),
        **dict.fromkeys(("lse", *(partial if split_keys else ())), "*fp32"),
        "sm_scale": "fp32",
        **dict.fromkeys(("batch", *strides), "i32"),
    }
    return KernelConfiguration(
        kernel=mla_paged_kernel,
        name=f"{chip} {dtype} H{heads} P{page_size} {'decode' if split_keys else 'prefill'}",
        signature=signature,
        constexprs={
            **({} if split_keys else dict.fromkeys(partial)),
            "HEADS": heads,
            "PAGE_SIZE": page_size,
            "CKV_DIM": 512,
            "KPE_DIM": 64,
            "BLOCK_M": tiling.block_m,
            "BLOCK_N": tiling.block_n,
            "CAUSAL": not split_keys,
            "SPLIT_KEYS": split_keys,
            "UPCAST": False,
        },
        aligned=frozenset({"q_nope", "q_pe", "ckv", "kpe", "out", *strides}),
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
        architectures=(chip,),
    )


def _latents(chip: str) -> Iterator[KernelConfiguration]:
    """Yields DeepSeek's latents of 512 + 64 in bfloat16, with few and with many heads; other dtypes once."""
    variants = (
        *(("bf16", heads, page_size) for heads in (16, 128) for page_size in (1, 16, 64)),
        *((dtype, heads, 16) for dtype in ("fp16", "fp32") for heads in (16, 128)),
    )
    for variant, split_keys in itertools.product(variants, (True, False)):
        yield _latent(chip, *variant, split_keys=split_keys)


ATTENTION = tuple(
    configuration
    for variants in (_decodes, _paged_prefills, _ragged_prefills, _latents)
    for chip in ARCHITECTURES
    for configuration in variants(chip)
)
