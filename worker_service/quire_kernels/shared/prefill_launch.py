"""The common part of both prefill launchers: checks and kernel arguments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from quire_kernels.shared.launch import (
    check_devices,
    check_queries,
    head_dim_blocks,
    option_arguments,
    output_like,
)
from quire_kernels.shared.options import AttentionOptions
from quire_kernels.shared.paged_cache import check_index_tensor
from quire_kernels.shared.prefill_rows import Masking, PrefillWork


@dataclass(frozen=True, slots=True, eq=False)
class PrefillLaunch:
    """The checked arguments of a launch, with pages or without."""

    grid: tuple[int]
    out: torch.Tensor  # [tokens, query_heads, v_head_dim]
    lse: torch.Tensor  # float32 [tokens, query_heads]
    arguments: dict[str, Any]

    @property
    def is_empty(self) -> bool:
        """Returns whether there are no queries, so that nothing must be launched."""
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
    """Checks queries, options, masks and division, and computes the kernel's arguments except the keys' own.

    Args:
        q: `[tokens, query_heads, head_dim]`.
        qo_indptr: int32 `[batch + 1]`.
        kv_heads: KV heads.
        head_dims: the head dim of keys and the head dim of values.
        kv_dtype: the dtype of keys and values.
        options: scale, soft cap, window and so on.
        masking: causal, chunks, custom mask.
        division: the result of `divide_prefill` for this qo_indptr.
        out: the caller's tensor for the result; None allocates it.
        lse: as `out`, for lse.
        interpreted: whether the kernel runs in Triton's interpreter.

    Raises:
        ValueError: a shape, dtype, device or stride does not fit; the message names the argument.
    """
    (tokens, heads), batch, tiling = q.shape[:2], division.work.batch, division.tiling
    check_queries(q, head_dim=head_dims[0], kv_heads=kv_heads, kv_dtype=kv_dtype)
    check_index_tensor("qo_indptr", qo_indptr, length=batch + 1)
    check_devices(q.device, qo_indptr=qo_indptr)
    options.check_heads(heads, kv_heads, q.device)
    masking.check(batch, q.device)
    if division.group != heads // kv_heads or division.token_count < tokens:
        raise ValueError("division was made for another ratio of heads, or for fewer tokens")
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
