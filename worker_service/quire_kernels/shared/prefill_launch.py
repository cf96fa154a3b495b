"""What the launchers of both prefill kernels share: checks, arguments, and the specialisations that ship."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from quire_kernels.shared.configurations import ELEMENT_BYTES, KernelConfiguration
from quire_kernels.shared.launch import (
    check_devices,
    check_queries,
    head_dim_blocks,
    option_arguments,
    output_like,
)
from quire_kernels.shared.options import AttentionOptions
from quire_kernels.shared.paged_cache import check_index_tensor
from quire_kernels.shared.prefill_rows import Masking, PrefillWork, prefill_tiling


@dataclass(frozen=True, slots=True, eq=False)
class PrefillLaunch:
    """What both kernels are launched with, checked."""

    grid: tuple[int]
    out: torch.Tensor  # [tokens, query_heads, v_head_dim]
    lse: torch.Tensor  # float32 [tokens, query_heads]
    arguments: dict[str, Any]

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to launch for."""
        return self.out.shape[0] == 0 or self.grid[0] == 0


def prepare_prefill(
    q: torch.Tensor,
    qo_indptr: torch.Tensor,
    kv_heads: int,
    head_dims: tuple[int, int],
    kv_dtype: torch.dtype,
    options: AttentionOptions,
    masking: Masking,
    division: PrefillWork,
    *,
    out: torch.Tensor | None,
    lse: torch.Tensor | None,
    interpreted: bool,
) -> PrefillLaunch:
    """Checks queries, options, masks and division, and says what follows from them for either kernel.

    Args:
        q: `[tokens, query_heads, head_dim]`.
        qo_indptr: int32 `[batch + 1]`.
        kv_heads: KV heads.
        head_dims: of keys and of values.
        kv_dtype: of both.
        options: scale, soft cap, window and so on.
        masking: causal, chunks, custom mask.
        division: by `divide_prefill` of this qo_indptr.
        out: the caller's place for the result, if there is one.
        lse: the same for lse.
        interpreted: whether the kernel is.

    Raises:
        ValueError: a shape, dtype, device or stride does not fit; names the argument.
    """
    (tokens, heads), batch, tiling = q.shape[:2], division.work.batch, division.tiling
    check_queries(q, head_dim=head_dims[0], kv_heads=kv_heads, kv_dtype=kv_dtype)
    check_index_tensor("qo_indptr", qo_indptr, length=batch + 1)
    check_devices(q.device, qo_indptr=qo_indptr)
    options.check_heads(heads, kv_heads, q.device)
    masking.check(batch, q.device)
    if division.group != heads // kv_heads or division.token_count < tokens:
        raise ValueError("division is for another ratio of heads, or fewer tokens")
    arguments = {
        **option_arguments(options),
        **masking.arguments(),
        **head_dim_blocks(*head_dims),
        "window_left": options.window_left,
        "batch": batch,
        "KV_HEADS": kv_heads,
        "GROUP": division.group,
        "WINDOW": options.window_left >= 0,
        "BLOCK_M": tiling.block_m,
        "BLOCK_N": tiling.block_n,
        "UPCAST": interpreted,
        "num_warps": tiling.num_warps,
        "num_stages": tiling.num_stages,
    }
    return PrefillLaunch(
        (division.work.capacity * kv_heads if batch else 0,),
        output_like("out", out, (tokens, heads, head_dims[1]), q.dtype, q.device),
        output_like("lse", lse, (tokens, heads), torch.float32, q.device),
        arguments,
    )


def prefill_configuration(
    kernel: Any, indices: tuple[str, ...], strides: tuple[str, ...], *, chip: str, **variant: Any
) -> KernelConfiguration:
    """One specialisation of a prefill kernel.

    Args:
        kernel: either of the two.
        indices: its int32 arguments.
        strides: its run-time strides.
        chip: that it is for.
        variant: dtype, cache, dims, group, page_size, rows, options, mask, causal; see the declarations.
    """
    dtype, cache, dims = variant["dtype"], variant.get("cache", variant["dtype"]), variant["dims"]
    rows, options, mask = variant.get("rows", 1024), variant.get("options", False), variant.get("mask", 0)
    is_fp8 = ELEMENT_BYTES[cache] == 1
    tiling = prefill_tiling(chip, rows, dims[0], dims[1], ELEMENT_BYTES[dtype], masked=mask > 0, is_fp8=is_fp8)
    optional = ("sinks", "slopes", "k_scale", "v_scale")
    present = optional if options else ("k_scale", "v_scale") if is_fp8 else ()
    sizes = {"KV_HEADS": 8, "GROUP": variant.get("group", 4), **head_dim_blocks(*dims)}
    if "PAGE_SIZE" in kernel.arg_names:
        sizes["PAGE_SIZE"] = variant.get("page_size", 16)
    signature = {
        **dict.fromkeys(("q", "out"), f"*{dtype}"),
        **dict.fromkeys(("k", "v"), f"*{cache}"),
        **dict.fromkeys(("units", "unit_indptr", *indices), "*i32"),
        **dict.fromkeys(("lse", *present), "*fp32"),
        **dict.fromkeys(("sm_scale", "soft_cap"), "fp32"),
        **dict.fromkeys(("window_left", "chunk_size", "batch", *strides), "i32"),
        **({"mask": "*u8", "mask_indptr": "*i64"} if mask else {}),
    }
    title = [chip, dtype, f"cache {cache}", f"D{dims[0]} V{dims[1]}", f"G{sizes['GROUP']}", f"M{tiling.block_m}"]
    title += [f"P{sizes['PAGE_SIZE']}"] if "PAGE_SIZE" in sizes else []
    title += ["options"] if options else []
    title += [f"mask {mask}"] if mask else [] if variant.get("causal", True) else ["not causal"]
    return KernelConfiguration(
        kernel=kernel,
        name=" ".join(title),
        signature=signature,
        constexprs={
            **{name: None for name in (*optional, "mask", "mask_indptr") if name not in signature},
            **dict.fromkeys(("stride_q_dim", "stride_k_dim", "stride_v_dim"), 1),
            **sizes,
            "BLOCK_M": tiling.block_m,
            "BLOCK_N": tiling.block_n,
            "CAUSAL": variant.get("causal", not mask),
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


def tiling_variants(chip: str, fp8: str) -> Iterator[dict[str, Any]]:
    """Each tiling that `prefill_tiling` gives for a chip, at the largest head dims that get it and with all options."""
    seen = set()
    for dtype, mask in itertools.product(("bf16", "fp32"), (0, 2)):
        for cache, dims, rows in itertools.product((dtype, fp8), ((256, 256), (192, 128), (128, 128)), (16, 64, 128)):
            is_fp8 = cache == fp8
            tiling = prefill_tiling(chip, rows, *dims, ELEMENT_BYTES[dtype], masked=mask > 0, is_fp8=is_fp8)
            if (dtype, mask, cache, tiling) not in seen:
                seen.add((dtype, mask, cache, tiling))
                yield {"dtype": dtype, "cache": cache, "dims": dims, "rows": rows, "mask": mask, "options": True}
