"""`BatchPrefillWithPagedKVCacheWrapper`: FlashInfer's name and arguments over `prefill_paged`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partialmethod
from typing import Any

import torch

from quire_kernels.flashinfer.arguments import PREFILL_CONSTRUCTOR, PREFILL_PLAN, PREFILL_RUN, check_others
from quire_kernels.flashinfer.common import (
    CheckedTable,
    DType,
    PlannedTable,
    check_planned,
    check_table,
    fixed_tensors,
    planned_dtypes,
    planned_options,
    result_of,
    run_options,
    workspace_bytes,
)
from quire_kernels.flashinfer.prefill_plan import CheckedQueries, MaskRequest, PlannedQueries, PrefillShape, check_plan
from quire_kernels.ops.prefill_attention import prefill_paged
from quire_kernels.shared.numbers import require_sizes
from quire_kernels.shared.options import AttentionOptions, Scale
from quire_kernels.shared.paged_cache import PagedKVCache, check_kv_layout, kv_lengths, unpack_paged_cache


@dataclass(frozen=True, slots=True, eq=False)
class CheckedPrefill:
    """The checked inputs of a plan."""

    table: CheckedTable
    queries: CheckedQueries

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """Returns all tensors of the plan, under the names of their buffers."""
        return {**self.table.tensors, **self.queries.tensors}


class BatchPrefillWithPagedKVCacheWrapper:
    """Attends ragged queries to pages: prompts, chunks of prompts, and drafts to verify.

    Lifecycle: 1. The wrapper is made with a workspace. 2. `plan` runs once per forward pass: it checks page table and
    masks, which may be on the host, and divides the work. 3. `run` runs once per layer, and only launches kernels, so a
    CUDA graph can capture it. With `use_cuda_graph` the first plan fixes the batch size and the maximum of query
    tokens, and later plans write to the same memory.
    """

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: torch.Tensor | None = None,
        paged_kv_indptr_buf: torch.Tensor | None = None,
        paged_kv_indices_buf: torch.Tensor | None = None,
        paged_kv_last_page_len_buf: torch.Tensor | None = None,
        custom_mask_buf: torch.Tensor | None = None,
        mask_indptr_buf: torch.Tensor | None = None,
        **others: Any,
    ) -> None:
        """Takes the workspace, and uses only its device: prefill is not split by keys, so it has no partial results.

        Args:
            float_workspace_buffer: uint8 vector; everything runs on its device.
            kv_layout: "NHD" or "HND".
            use_cuda_graph: whether tensors keep their addresses from plan to plan; this requires the first four
                buffers.
            qo_indptr_buf: int32 `[batch + 1]`.
            paged_kv_indptr_buf: int32 `[batch + 1]`.
            paged_kv_indices_buf: int32, as long as the most pages of any plan.
            paged_kv_last_page_len_buf: int32 `[batch]`.
            custom_mask_buf: uint8 (packed) or bool, as long as the largest mask; a graph with masks needs it.
            mask_indptr_buf: int64 `[batch + 1]`; a graph with masks needs it.
            **others: see `flashinfer.arguments.PREFILL_CONSTRUCTOR`.

        Raises:
            ValueError: the layout is unknown, a buffer is missing or on another device, the workspace is not a vector
                of bytes, or one of the others cannot be honored; the message names the argument.
        """
        check_others(type(self).__name__, PREFILL_CONSTRUCTOR, others)
        check_kv_layout(kv_layout)
        given = {
            "qo_indptr_buf": qo_indptr_buf,
            "paged_kv_indptr_buf": paged_kv_indptr_buf,
            "paged_kv_indices_buf": paged_kv_indices_buf,
            "paged_kv_last_page_len_buf": paged_kv_last_page_len_buf,
        }
        masks = {"custom_mask_buf": custom_mask_buf, "mask_indptr_buf": mask_indptr_buf}
        workspace = workspace_bytes(float_workspace_buffer)
        self._device = workspace.device
        self._kv_layout = kv_layout
        self._use_cuda_graph = use_cuda_graph
        self._tensors = fixed_tensors(workspace, use_cuda_graph, given, masks)
        self._planned: tuple[PlannedTable, PlannedQueries] | None = None

    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        head_dim_vo: int | None = None,
        custom_mask: torch.Tensor | None = None,
        packed_custom_mask: torch.Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: DType = "float16",
        kv_data_type: DType | None = None,
        o_data_type: DType | None = None,
        *,
        chunk_size: int = 0,
        alibi_slopes: torch.Tensor | None = None,
        **others: Any,
    ) -> None:
        """Checks the batch and divides its work. The index tensors may be on any device.

        Args:
            qo_indptr: int32 `[batch + 1]`, query tokens of each request.
            paged_kv_indptr: int32 `[batch + 1]`.
            paged_kv_indices: int32 `[paged_kv_indptr[batch]]` or longer.
            paged_kv_last_page_len: int32 `[batch]`, in `1..page_size`.
            num_qo_heads: query heads, any multiple of num_kv_heads.
            num_kv_heads: KV heads.
            head_dim_qk: the head dim of queries and keys.
            page_size: tokens per page.
            head_dim_vo: the head dim of values and results; head_dim_qk if None.
            custom_mask: bool `[sum(q_len * kv_len)]`, True where a query sees a key; replaces causal.
            packed_custom_mask: uint8, the same mask as bits in little bit order; each request starts at a new byte.
            causal: right-aligned: the last query of a request sees its last key.
            pos_encoding_mode: "NONE" or "ALIBI".
            use_fp16_qk_reduction: a hint without effect: products are accumulated in float32.
            sm_scale: 1 / sqrt(head_dim_qk) if None.
            window_left: how many keys before its own position a query sees; -1: all.
            logits_soft_cap: cap * tanh(x / cap) of the scores; None or 0: no cap.
            rope_scale: ignored, as in FlashInfer when it rotates nothing.
            rope_theta: ignored, as `rope_scale`.
            q_data_type: float16, bfloat16 or float32.
            kv_data_type: float8_e4m3fn, float8_e5m2, or None for the dtype of q.
            o_data_type: only q's dtype.
            chunk_size: tokens per chunk; a query sees only keys of its own chunk; 0: no chunks.
            alibi_slopes: float32 `[num_qo_heads]`; the ALiBi paper's slopes if None.
            **others: see `flashinfer.arguments.PREFILL_PLAN`.

        Raises:
            ValueError: an argument is out of range, does not fit, or cannot be honored; the message names it.
        """
        check_others("plan", PREFILL_PLAN, others)
        dtypes = planned_dtypes(q_data_type, kv_data_type, o_data_type)
        num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo, page_size = require_sizes(
            num_qo_heads=num_qo_heads, num_kv_heads=num_kv_heads, head_dim_qk=head_dim_qk,
            head_dim_vo=head_dim_qk if head_dim_vo is None else head_dim_vo, page_size=page_size,
        )  # fmt: skip
        shape = PrefillShape(num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo, page_size, *dtypes)
        options = planned_options(
            query_heads=num_qo_heads, kv_heads=num_kv_heads, head_dim=head_dim_qk, pos_encoding_mode=pos_encoding_mode,
            window_left=window_left, logits_soft_cap=logits_soft_cap, sm_scale=sm_scale, alibi_slopes=alibi_slopes,
            device=self._device,
        )  # fmt: skip
        pages = (paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        masks = MaskRequest(custom_mask, packed_custom_mask, causal, chunk_size)
        self.place(self.check(qo_indptr, pages, shape, options, masks))

    def check(
        self,
        qo_indptr: torch.Tensor,
        pages: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        shape: PrefillShape,
        options: AttentionOptions,
        masks: MaskRequest,
    ) -> CheckedPrefill:
        """Checks the arguments of `plan`. Changes nothing.

        Args:
            qo_indptr: as for `plan`.
            pages: paged_kv_indptr, paged_kv_indices and paged_kv_last_page_len.
            shape: heads, dims, page size, dtypes.
            options: scale, soft cap and so on.
            masks: the arguments that limit the keys of each query.

        Raises:
            ValueError: an argument is invalid, as described for `plan`.
        """
        table = check_table(*pages, page_size=shape.page_size, prefix="paged_kv_", buffer_suffix="_buf")
        lengths = kv_lengths(pages[0], pages[2], shape.page_size)
        before = self._planned[1] if self._use_cuda_graph and self._planned is not None else None
        queries = check_plan(qo_indptr, lengths, shape, options, masks, before)
        checked = CheckedPrefill(table, queries)
        self._tensors.check(checked.tensors)
        return checked

    def place(self, checked: CheckedPrefill) -> None:
        """Copies a checked plan to the device, and divides the work."""
        placed = self._tensors.put(checked.tensors)
        self._planned = checked.table.place(placed), checked.queries.place(placed)

    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: PagedKVCache,
        *,
        q_scale: Scale | None = None,
        k_scale: Scale | None = None,
        v_scale: Scale | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        lse_base: str = "log2",
        window_left: int | None = None,
        sinks: torch.Tensor | None = None,
        **others: Any,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Computes attention of one layer. Does not wait for the device.

        Args:
            q: `[qo_indptr[batch], num_qo_heads, head_dim_qk]`, of q_data_type, any strides.
            paged_kv_cache: 5-D or a pair of 4-D tensors in the wrapper's layout, of kv_data_type, any strides.
            q_scale: factor of q, a number or float32 of one entry.
            k_scale: factor of the cache's keys, a number or float32 `[num_kv_heads]`.
            v_scale: factor of the cache's values, a number or float32 `[num_kv_heads]`.
            out: tensor for the result, written in place; None allocates it.
            lse: tensor for the result, written in place; None allocates it.
            return_lse: whether lse is returned too.
            lse_base: "log2", or "ln" for natural logarithms.
            window_left: replaces the planned value; None keeps it.
            sinks: float32 `[num_qo_heads]`, natural logarithms, not scaled; a sink counts once, also in lse.
            **others: see `flashinfer.arguments.PREFILL_RUN`.

        Returns:
            `[tokens, num_qo_heads, head_dim_vo]` of q's dtype, and with `return_lse` float32 `[tokens, num_qo_heads]`,
            in base 2 or as `lse_base` says. A query that sees no key gives zeros and -inf (or the lse of its sink).

        Raises:
            ValueError: there is no plan, or an argument differs from the plan or cannot be honored; the message names
                it.
        """
        check_others("run", PREFILL_RUN, others)
        if self._planned is None:
            raise ValueError("run needs a plan")
        table, queries = self._planned
        cache = unpack_paged_cache(paged_kv_cache, self._kv_layout)
        shape = queries.shape
        queries.check_run(q)
        check_planned(
            "paged_kv_cache dtype, page_size, kv_heads, head dims",
            (cache.dtype, cache.page_size, cache.num_kv_heads, cache.head_dim, cache.v_head_dim),
            (shape.kv_dtype, shape.page_size, shape.kv_heads, shape.head_dim_qk, shape.head_dim_vo),
        )
        table.check_pool("paged_kv_indices", cache.page_count)
        options = run_options(
            queries.options, shape.kv_heads, q.device, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale, sinks=sinks,
            window_left=window_left,
        )  # fmt: skip
        result, result_lse = prefill_paged(
            q, cache, queries.qo_indptr, table.indptr, table.indices, table.last_page_len, options, queries.masking,
            queries.division, out=out, lse=lse,
        )  # fmt: skip
        return result_of(result, result_lse, return_lse=return_lse, lse_base=lse_base)

    begin_forward = plan
    run_return_lse = partialmethod(run, return_lse=True)
