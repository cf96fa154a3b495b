"""`BatchDecodeWithPagedKVCacheWrapper`: FlashInfer's name and arguments over `decode_paged`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partialmethod
from typing import Any

import torch

from quire_kernels.flashinfer.arguments import CONSTRUCTOR, DECODE_PLAN, DECODE_RUN, check_others
from quire_kernels.flashinfer.common import (
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
from quire_kernels.ops.decode_paged import decode_paged
from quire_kernels.shared.decode_work import DecodeWork, divide_decode
from quire_kernels.shared.fp8 import is_fp8
from quire_kernels.shared.numbers import require_integer, require_sizes
from quire_kernels.shared.options import AttentionOptions, Scale
from quire_kernels.shared.paged_cache import PagedKVCache, check_kv_layout, unpack_paged_cache


@dataclass(frozen=True, slots=True, eq=False)
class _Plan:
    table: PlannedTable
    division: DecodeWork
    options: AttentionOptions
    shape: tuple[int, int, int]  # query heads, KV heads, head dim
    page_size: int
    q_dtype: torch.dtype
    kv_dtype: torch.dtype


class BatchDecodeWithPagedKVCacheWrapper:
    """Attends one query per request to the request's pages.

    Lifecycle: 1. The wrapper is made with a workspace. 2. `plan` runs once per forward pass: it checks the page table,
    which may be on the host, and divides the work. 3. `run` runs once per layer, and only launches kernels, so a CUDA
    graph can capture it. With `use_cuda_graph` a later `plan` of the same batch size writes to the same memory, so a
    replay uses the new plan.
    """

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: torch.Tensor | None = None,
        paged_kv_indices_buffer: torch.Tensor | None = None,
        paged_kv_last_page_len_buffer: torch.Tensor | None = None,
        **others: Any,
    ) -> None:
        """Takes the workspace; everything runs on its device.

        Args:
            float_workspace_buffer: uint8 vector, for the partial results of split requests.
            kv_layout: "NHD" or "HND".
            use_cuda_graph: whether tensors keep their addresses from plan to plan; this requires the three buffers.
            use_tensor_cores: a hint without effect: tensor cores are always used.
            paged_kv_indptr_buffer: int32 `[batch + 1]`.
            paged_kv_indices_buffer: int32, as long as the most pages of any plan.
            paged_kv_last_page_len_buffer: int32 `[batch]`.
            **others: see `flashinfer.arguments.CONSTRUCTOR`.

        Raises:
            ValueError: the layout is unknown, a buffer is missing or on another device, the workspace is not a vector
                of bytes, or one of the others cannot be honored; the message names the argument.
        """
        check_others(type(self).__name__, CONSTRUCTOR, others)
        check_kv_layout(kv_layout)
        given = {
            "paged_kv_indptr_buffer": paged_kv_indptr_buffer,
            "paged_kv_indices_buffer": paged_kv_indices_buffer,
            "paged_kv_last_page_len_buffer": paged_kv_last_page_len_buffer,
        }
        self._workspace = workspace_bytes(float_workspace_buffer)
        self._kv_layout = kv_layout
        self._use_cuda_graph = use_cuda_graph
        self._tensors = fixed_tensors(self._workspace, use_cuda_graph, given)
        self._planned: _Plan | None = None

    def plan(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        pos_encoding_mode: str = "NONE",
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: DType | None = None,
        kv_data_type: DType | None = None,
        o_data_type: DType | None = None,
        data_type: DType | None = None,
        sm_scale: float | None = None,
        *,
        disable_split_kv: bool = False,
        alibi_slopes: torch.Tensor | None = None,
        **others: Any,
    ) -> None:
        """Checks the batch and divides its work.

        Args:
            indptr: int32 `[batch + 1]`, on any device.
            indices: int32 `[indptr[batch]]` or longer.
            last_page_len: int32 `[batch]`, in `1..page_size`.
            num_qo_heads: query heads, any multiple of num_kv_heads.
            num_kv_heads: KV heads.
            head_dim: the head dim of keys and values.
            page_size: tokens per page.
            pos_encoding_mode: "NONE" or "ALIBI".
            window_left: how many keys before its own position a query sees; -1: all.
            logits_soft_cap: cap * tanh(x / cap) of the scores; None or 0: no cap.
            q_data_type: float16, bfloat16 or float32. None: `data_type`, or float16 without it.
            kv_data_type: float8_e4m3fn, float8_e5m2 or q's dtype. None: `data_type`, or q's dtype without it.
            o_data_type: only q's dtype.
            data_type: FlashInfer's older argument for both q_data_type and kv_data_type.
            sm_scale: 1 / sqrt(head_dim) if None.
            disable_split_kv: whether the keys of a request are summed in an order that does not depend on the batch;
                slow for long requests.
            alibi_slopes: float32 `[num_qo_heads]`; the ALiBi paper's slopes if None.
            **others: see `flashinfer.arguments.DECODE_PLAN`.

        Raises:
            ValueError: an argument is out of range, does not fit, or cannot be honored; the message names it.
        """
        check_others("plan", DECODE_PLAN, others)
        num_qo_heads, num_kv_heads, head_dim, page_size = require_sizes(
            num_qo_heads=num_qo_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, page_size=page_size
        )
        device = self._workspace.device
        q_dtype, kv_dtype = planned_dtypes(
            q_data_type or data_type or "float16", kv_data_type or data_type, o_data_type
        )
        options = planned_options(
            query_heads=num_qo_heads,
            kv_heads=num_kv_heads,
            head_dim=head_dim,
            pos_encoding_mode=pos_encoding_mode,
            window_left=window_left,
            logits_soft_cap=logits_soft_cap,
            sm_scale=sm_scale,
            alibi_slopes=alibi_slopes,
            device=device,
        )
        shape = (num_qo_heads, num_kv_heads, head_dim)
        before = self._planned if self._use_cuda_graph else None
        if before is not None:
            was = (before.shape, before.page_size, before.q_dtype, before.kv_dtype, before.options.window_left)
            check_planned("use_cuda_graph: plan", (shape, page_size, q_dtype, kv_dtype, window_left), was)
        checked = check_table(indptr, indices, last_page_len, page_size=page_size)
        table = checked.place(self._tensors.put(checked.tensors))
        division = divide_decode(
            table.indptr, table.last_page_len, page_size=page_size, query_heads=num_qo_heads, kv_heads=num_kv_heads,
            head_dim=head_dim, v_head_dim=head_dim, element_bytes=q_dtype.itemsize, is_fp8=is_fp8(kv_dtype),
            window_left=window_left, split_keys=not disable_split_kv, workspace=self._workspace,
            out=None if before is None else before.division,
        )  # fmt: skip
        self._planned = _Plan(table, division, options, shape, page_size, q_dtype, kv_dtype)

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
        window_left: int | None = None,
        sinks: torch.Tensor | None = None,
        **others: Any,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Computes attention of one layer. Does not wait for the device.

        Args:
            q: `[batch, num_qo_heads, head_dim]`, of q_data_type, any strides.
            paged_kv_cache: 5-D or a pair of 4-D tensors in the wrapper's layout, of kv_data_type, any strides.
            q_scale: factor of q, a number or float32 of one entry.
            k_scale: factor of the cache's keys, a number or float32 `[num_kv_heads]`.
            v_scale: factor of the cache's values, a number or float32 `[num_kv_heads]`.
            out: tensor for the result, written in place; None allocates it.
            lse: tensor for the result, written in place; None allocates it.
            return_lse: whether lse is returned too.
            window_left: None, or the planned value.
            sinks: float32 `[num_qo_heads]`, natural logarithms, not scaled; a sink counts once, also in lse.
            **others: see `flashinfer.arguments.DECODE_RUN`.

        Returns:
            `[batch, num_qo_heads, head_dim]` of q's dtype, and with `return_lse` float32 `[batch, num_qo_heads]`, in
            base 2. A request without keys gives zeros and -inf (or the lse of its sink).

        Raises:
            ValueError: there is no plan, or an argument differs from the plan or cannot be honored; the message names
                it.
        """
        check_others("run", DECODE_RUN, others)
        plan = self._planned
        if plan is None:
            raise ValueError("run needs a plan")
        cache = unpack_paged_cache(paged_kv_cache, self._kv_layout)
        heads, kv_heads, head_dim = plan.shape
        check_planned("q", (tuple(q.shape), q.dtype), ((plan.division.work.batch, heads, head_dim), plan.q_dtype))
        check_planned("paged_kv_cache dtype", cache.dtype, plan.kv_dtype)
        check_planned(
            "paged_kv_cache page_size, kv_heads, head dims",
            (cache.page_size, cache.num_kv_heads, cache.head_dim, cache.v_head_dim),
            (plan.page_size, kv_heads, head_dim, head_dim),
        )
        if window_left is not None:
            check_planned("window_left", require_integer("window_left", window_left, -1), plan.options.window_left)
        plan.table.check_pool("indices", cache.page_count)
        options = run_options(
            plan.options, kv_heads, q.device, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale, sinks=sinks
        )
        table = plan.table
        result, result_lse = decode_paged(
            q, cache, table.indptr, table.indices, table.last_page_len, options, plan.division, out=out, lse=lse
        )
        return result_of(result, result_lse, return_lse=return_lse)

    begin_forward = plan
    run_return_lse = partialmethod(run, return_lse=True)
