"""`BatchPrefillWithRaggedKVCacheWrapper`: FlashInfer's name and arguments over `prefill_ragged`."""

from __future__ import annotations

from functools import partialmethod
from typing import Any

import torch

from quire_kernels.flashinfer.arguments import PREFILL_CONSTRUCTOR, RAGGED_PLAN, RAGGED_RUN, check_others
from quire_kernels.flashinfer.common import (
    DType,
    check_planned,
    fixed_tensors,
    planned_dtypes,
    planned_options,
    result_of,
    run_options,
    workspace_bytes,
)
from quire_kernels.flashinfer.prefill_plan import MaskRequest, PlannedQueries, PrefillShape, check_plan
from quire_kernels.ops.prefill_attention import prefill_ragged
from quire_kernels.shared.numbers import require_sizes
from quire_kernels.shared.options import Scale
from quire_kernels.shared.paged_cache import check_indptr, check_kv_layout


class BatchPrefillWithRaggedKVCacheWrapper:
    """Attends ragged queries to ragged keys, like `BatchPrefillWithPagedKVCacheWrapper` without pages.

    Lifecycle: 1. The wrapper is made. 2. `plan` runs once per forward pass. 3. `run` runs once per layer, and only
    launches kernels. With `use_cuda_graph` the first plan fixes the batch size and the maximum of query tokens.
    """

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: torch.Tensor | None = None,
        kv_indptr_buf: torch.Tensor | None = None,
        custom_mask_buf: torch.Tensor | None = None,
        mask_indptr_buf: torch.Tensor | None = None,
        **others: Any,
    ) -> None:
        """Takes the workspace, and uses only its device.

        Args:
            float_workspace_buffer: uint8 vector; everything runs on its device.
            kv_layout: "NHD" or "HND"; with "HND", k and v of `run` are `[kv_heads, tokens, head_dim]`.
            use_cuda_graph: whether tensors keep their addresses from plan to plan; this requires the first two buffers.
            qo_indptr_buf: int32 `[batch + 1]`.
            kv_indptr_buf: int32 `[batch + 1]`.
            custom_mask_buf: uint8 (packed) or bool, as long as the largest mask; a graph with masks needs it.
            mask_indptr_buf: int64 `[batch + 1]`; a graph with masks needs it.
            **others: see `flashinfer.arguments.PREFILL_CONSTRUCTOR`.

        Raises:
            ValueError: the layout is unknown, a buffer is missing or on another device, the workspace is not a vector
                of bytes, or one of the others cannot be honored; the message names the argument.
        """
        check_others(type(self).__name__, PREFILL_CONSTRUCTOR, others)
        check_kv_layout(kv_layout)
        given = {"qo_indptr_buf": qo_indptr_buf, "kv_indptr_buf": kv_indptr_buf}
        masks = {"custom_mask_buf": custom_mask_buf, "mask_indptr_buf": mask_indptr_buf}
        workspace = workspace_bytes(float_workspace_buffer)
        self._device = workspace.device
        self._kv_layout = kv_layout
        self._use_cuda_graph = use_cuda_graph
        self._tensors = fixed_tensors(workspace, use_cuda_graph, given, masks)
        self._planned: tuple[torch.Tensor, int, PlannedQueries] | None = None  # kv_indptr, kv_indptr[-1], queries

    def plan(
        self,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        head_dim_vo: int | None = None,
        custom_mask: torch.Tensor | None = None,
        packed_custom_mask: torch.Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
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
            kv_indptr: int32 `[batch + 1]`, keys of each request.
            num_qo_heads: query heads, any multiple of num_kv_heads.
            num_kv_heads: KV heads.
            head_dim_qk: the head dim of queries and keys.
            head_dim_vo: the head dim of values and results; head_dim_qk if None.
            custom_mask: bool `[sum(q_len * kv_len)]`, True where a query sees a key; replaces causal.
            packed_custom_mask: uint8, the same mask as bits in little bit order; each request starts at a new byte.
            causal: right-aligned: the last query of a request sees its last key.
            pos_encoding_mode: "NONE" or "ALIBI".
            use_fp16_qk_reduction: a hint without effect: products are accumulated in float32.
            window_left: how many keys before its own position a query sees; -1: all.
            logits_soft_cap: cap * tanh(x / cap) of the scores; None or 0: no cap.
            sm_scale: 1 / sqrt(head_dim_qk) if None.
            rope_scale: ignored, as in FlashInfer when it rotates nothing.
            rope_theta: ignored, as `rope_scale`.
            q_data_type: float16, bfloat16 or float32.
            kv_data_type: float8_e4m3fn, float8_e5m2, or None for the dtype of q.
            o_data_type: only q's dtype.
            chunk_size: tokens per chunk; a query sees only keys of its own chunk; 0: no chunks.
            alibi_slopes: float32 `[num_qo_heads]`; the ALiBi paper's slopes if None.
            **others: see `flashinfer.arguments.RAGGED_PLAN`.

        Raises:
            ValueError: an argument is out of range, does not fit, or cannot be honored; the message names it.
        """
        check_others("plan", RAGGED_PLAN, others)
        dtypes = planned_dtypes(q_data_type, kv_data_type, o_data_type)
        num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo = require_sizes(
            num_qo_heads=num_qo_heads, num_kv_heads=num_kv_heads, head_dim_qk=head_dim_qk,
            head_dim_vo=head_dim_qk if head_dim_vo is None else head_dim_vo,
        )  # fmt: skip
        shape = PrefillShape(num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo, 0, *dtypes)
        options = planned_options(
            query_heads=num_qo_heads, kv_heads=num_kv_heads, head_dim=head_dim_qk, pos_encoding_mode=pos_encoding_mode,
            window_left=window_left, logits_soft_cap=logits_soft_cap, sm_scale=sm_scale, alibi_slopes=alibi_slopes,
            device=self._device,
        )  # fmt: skip
        check_indptr("kv_indptr", kv_indptr)
        before = self._planned[2] if self._use_cuda_graph and self._planned is not None else None
        masks = MaskRequest(custom_mask, packed_custom_mask, causal, chunk_size)
        checked = check_plan(qo_indptr, kv_indptr.diff(), shape, options, masks, before)
        placed = self._tensors.put({**checked.tensors, "kv_indptr_buf": kv_indptr})
        self._planned = placed["kv_indptr_buf"], int(kv_indptr[-1]), checked.place(placed)

    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        q_scale: Scale | None = None,
        k_scale: Scale | None = None,
        v_scale: Scale | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        lse_base: str = "log2",
        sinks: torch.Tensor | None = None,
        **others: Any,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Computes attention of one layer. Does not wait for the device.

        Args:
            q: `[qo_indptr[batch], num_qo_heads, head_dim_qk]`, of q_data_type, any strides.
            k: `[kv_indptr[batch], num_kv_heads, head_dim_qk]` (NHD), of kv_data_type, any strides.
            v: `[kv_indptr[batch], num_kv_heads, head_dim_vo]` (NHD), of kv_data_type, any strides.
            q_scale: factor of q, a number or float32 of one entry.
            k_scale: factor of the keys, a number or float32 `[num_kv_heads]`.
            v_scale: factor of the values, a number or float32 `[num_kv_heads]`.
            out: tensor for the result, written in place; None allocates it.
            lse: tensor for the result, written in place; None allocates it.
            return_lse: whether lse is returned too.
            lse_base: "log2", or "ln" for natural logarithms.
            sinks: float32 `[num_qo_heads]`, natural logarithms, not scaled; a sink counts once, also in lse.
            **others: see `flashinfer.arguments.RAGGED_RUN`.

        Returns:
            `[tokens, num_qo_heads, head_dim_vo]` of q's dtype, and with `return_lse` float32 `[tokens, num_qo_heads]`,
            in base 2 or as `lse_base` says. A query that sees no key gives zeros and -inf (or the lse of its sink).

        Raises:
            ValueError: there is no plan, or an argument differs from the plan or cannot be honored; the message names
                it.
        """
        check_others("run", RAGGED_RUN, others)
        if self._planned is None:
            raise ValueError("run needs a plan")
        kv_indptr, kv_tokens, queries = self._planned
        shape = queries.shape
        queries.check_run(q)
        if self._kv_layout == "HND":
            k, v = k.transpose(0, 1), v.transpose(0, 1)
        for name, tensor, head_dim in (("k", k, shape.head_dim_qk), ("v", v, shape.head_dim_vo)):
            actual = (tuple(tensor.shape), tensor.dtype)
            check_planned(name, actual, ((kv_tokens, shape.kv_heads, head_dim), shape.kv_dtype))
        options = run_options(
            queries.options, shape.kv_heads, q.device, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale, sinks=sinks
        )
        result, result_lse = prefill_ragged(
            q, k, v, queries.qo_indptr, kv_indptr, options, queries.masking, queries.division, out=out, lse=lse
        )
        return result_of(result, result_lse, return_lse=return_lse, lse_base=lse_base)

    begin_forward = plan
    run_return_lse = partialmethod(run, return_lse=True)
