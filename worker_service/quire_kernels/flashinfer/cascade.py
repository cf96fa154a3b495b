"""Attention in levels over shared prefixes: the keys of a shared prefix are read once for all its requests.

Level l groups the query tokens by its own qo_indptr. On the first level, all requests under one prefix form one long
request. On the last level, every request is separate. With output o_l and lse L_l (base 2) of each level,

    L = log2(sum_l 2^L_l);   out = sum_l 2^(L_l - L) o_l

Every level is a prefill over pages (`prefill_paged`), and `merge_states` merges the levels. Causality applies on the
last level only, because shared keys precede all queries. A window would apply to each level separately, which is wrong,
so windows are refused. `cascade_gains` estimates whether two levels are faster than one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch

from quire_kernels.flashinfer.common import DType, planned_dtypes, planned_options
from quire_kernels.flashinfer.prefill import BatchPrefillWithPagedKVCacheWrapper
from quire_kernels.flashinfer.prefill_plan import MaskRequest, PrefillShape
from quire_kernels.ops.merge_states import merge_state_in_place
from quire_kernels.shared.numbers import require_integer, require_sizes
from quire_kernels.shared.options import Scale
from quire_kernels.shared.paged_cache import PagedKVCache


class MultiLevelCascadeAttentionWrapper:
    """Attends to shared prefixes level by level; name and arguments are FlashInfer's.

    Lifecycle: 1. The wrapper is made for a number of levels. 2. `plan` runs once per forward pass, and checks all
    levels before it writes to the first. 3. `run` runs once per layer, and only launches kernels. With `use_cuda_graph`
    the first plan fixes each level's batch size and maximum of query tokens, and later plans write to the same memory.
    """

    def __init__(
        self,
        num_levels: int,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf_arr: Sequence[torch.Tensor] | None = None,
        paged_kv_indptr_buf_arr: Sequence[torch.Tensor] | None = None,
        paged_kv_indices_buf_arr: Sequence[torch.Tensor] | None = None,
        paged_kv_last_page_len_buf_arr: Sequence[torch.Tensor] | None = None,
    ) -> None:
        """Makes a prefill wrapper per level.

        Args:
            num_levels: number of levels, at least 1.
            float_workspace_buffer: uint8 vector; everything runs on its device.
            kv_layout: "NHD" or "HND".
            use_cuda_graph: whether tensors keep their addresses from plan to plan; this requires the buffers, one of
                each per level.
            qo_indptr_buf_arr: int32 `[groups + 1]` each.
            paged_kv_indptr_buf_arr: int32 `[groups + 1]` each.
            paged_kv_indices_buf_arr: int32 each, as long as the most pages of any plan on that level.
            paged_kv_last_page_len_buf_arr: int32 `[groups]` each.

        Raises:
            ValueError: there is no level, the layout is unknown, a buffer is missing or on another device, or the
                workspace is not a vector of bytes.
        """
        (num_levels,) = require_sizes(num_levels=num_levels)
        buffers = {
            "qo_indptr_buf_arr": qo_indptr_buf_arr,
            "paged_kv_indptr_buf_arr": paged_kv_indptr_buf_arr,
            "paged_kv_indices_buf_arr": paged_kv_indices_buf_arr,
            "paged_kv_last_page_len_buf_arr": paged_kv_last_page_len_buf_arr,
        }
        for name, array in buffers.items():
            if use_cuda_graph and (array is None or len(array) != num_levels):
                raise ValueError(f"use_cuda_graph needs {num_levels} buffers in {name}, one per level")
        self._levels = []
        for level in range(num_levels):
            given = {
                name.removesuffix("_arr"): array[level]
                for name, array in buffers.items()
                if use_cuda_graph and array is not None
            }
            self._levels.append(
                BatchPrefillWithPagedKVCacheWrapper(float_workspace_buffer, kv_layout, use_cuda_graph, **given)
            )

    def plan(
        self,
        qo_indptr_arr: Sequence[torch.Tensor],
        paged_kv_indptr_arr: Sequence[torch.Tensor],
        paged_kv_indices_arr: Sequence[torch.Tensor],
        paged_kv_last_page_len: Sequence[torch.Tensor],
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
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
    ) -> None:
        """Checks all levels and divides their work. Each list has one entry per level, the most shared level first.

        Args:
            qo_indptr_arr: int32 `[groups + 1]` each, all ending at the number of query tokens.
            paged_kv_indptr_arr: int32 `[groups + 1]` each.
            paged_kv_indices_arr: int32 each.
            paged_kv_last_page_len: int32 `[groups]` each, in `1..page_size`.
            num_qo_heads: a multiple of num_kv_heads.
            num_kv_heads: KV heads.
            head_dim: the head dim of keys and values.
            page_size: tokens per page.
            causal: whether the last level is causal; the last query of a request sees its last key.
            pos_encoding_mode: only "NONE".
            use_fp16_qk_reduction: a hint without effect: products are accumulated in float32.
            sm_scale: 1 / sqrt(head_dim) if None.
            window_left: only -1.
            logits_soft_cap: cap * tanh(x / cap) of the scores; None or 0: no cap.
            rope_scale: ignored, as in FlashInfer when it rotates nothing.
            rope_theta: ignored, as `rope_scale`.
            q_data_type: float16, bfloat16 or float32.
            kv_data_type: float8_e4m3fn, float8_e5m2, or None for the dtype of q.

        Raises:
            ValueError: there is a window or a position encoding, lists differ in length, levels differ in the number of
                queries, or a level's wrapper refuses its arguments. The message names the argument, and the previous
                plan stays in force.
        """
        num_qo_heads, num_kv_heads, head_dim, page_size = require_sizes(
            num_qo_heads=num_qo_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, page_size=page_size
        )
        if require_integer("window_left", window_left, -1) != -1:
            raise ValueError(
                f"window_left must be -1, not {window_left}: a window would apply to each level separately"
            )
        if pos_encoding_mode != "NONE":
            raise ValueError(f'pos_encoding_mode must be "NONE", not {pos_encoding_mode!r}: a level has no positions')
        arrays = {
            "qo_indptr_arr": qo_indptr_arr,
            "paged_kv_indptr_arr": paged_kv_indptr_arr,
            "paged_kv_indices_arr": paged_kv_indices_arr,
            "paged_kv_last_page_len": paged_kv_last_page_len,
        }
        for name, array in arrays.items():
            if len(array) != len(self._levels):
                raise ValueError(f"{name} must have {len(self._levels)} levels, like the wrapper, not {len(array)}")
        tokens = [int(qo_indptr[-1]) for qo_indptr in qo_indptr_arr]
        if len(set(tokens)) != 1:
            raise ValueError(f"the arrays in qo_indptr_arr must all end at the same token, not at {tokens}")
        dtypes = planned_dtypes(q_data_type, kv_data_type)
        shape = PrefillShape(num_qo_heads, num_kv_heads, head_dim, head_dim, page_size, *dtypes)
        options = planned_options(
            query_heads=num_qo_heads, kv_heads=num_kv_heads, head_dim=head_dim, pos_encoding_mode="NONE",
            window_left=-1, logits_soft_cap=logits_soft_cap, sm_scale=sm_scale, alibi_slopes=None,
            device=qo_indptr_arr[0].device,
        )  # fmt: skip
        checked = []
        for level, (wrapper, qo_indptr, *pages) in enumerate(zip(self._levels, *arrays.values(), strict=True)):
            masks = MaskRequest(None, None, causal and level == len(self._levels) - 1, 0)
            checked.append(wrapper.check(qo_indptr, (pages[0], pages[1], pages[2]), shape, options, masks))
        for wrapper, level_plan in zip(self._levels, checked, strict=True):
            wrapper.place(level_plan)

    begin_forward = plan

    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: PagedKVCache,
        *,
        k_scale: Scale | None = None,
        v_scale: Scale | None = None,
        return_lse: bool = False,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Attends one layer, level by level.

        Args:
            q: `[tokens, num_qo_heads, head_dim]`, of q_data_type, any strides.
            paged_kv_cache: one pool for all levels, in the wrapper's layout.
            k_scale: factor of the cache's keys, a number or float32 `[num_kv_heads]`.
            v_scale: factor of the cache's values, a number or float32 `[num_kv_heads]`.
            return_lse: whether lse is returned too.
            sinks: float32 `[num_qo_heads]`, natural logarithms; they count once, on the last level.

        Returns:
            `[tokens, num_qo_heads, head_dim]` of q's dtype, and with `return_lse` float32 `[tokens, num_qo_heads]`, in
            base 2. A query that sees no key on any level gives zeros and -inf.

        Raises:
            ValueError: there is no plan, or an argument differs from the plan; the message names it.
        """
        out: torch.Tensor | None = None
        lse: torch.Tensor | None = None
        for level, wrapper in enumerate(self._levels):
            level_sinks = sinks if level == len(self._levels) - 1 else None
            result = wrapper.run(
                q, paged_kv_cache, k_scale=k_scale, v_scale=v_scale, return_lse=True, sinks=level_sinks
            )
            level_out, level_lse = cast(tuple[torch.Tensor, torch.Tensor], result)
            if out is None or lse is None:
                out, lse = level_out, level_lse
            else:
                merge_state_in_place(out, lse, level_out, level_lse)
        assert out is not None
        assert lse is not None
        return (out, lse) if return_lse else out
