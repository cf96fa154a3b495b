"""Attention in levels over prefixes that requests share: the keys of a shared prefix are read once for all.

Level l groups the query tokens by its own qo_indptr: on the first level all requests under one prefix are one long
request, on the last every request stands for itself. With o_l and L_l (base 2) of the levels,

    L = log2(sum_l 2^L_l);   out = sum_l 2^(L_l - L) o_l

Every level is a prefill over pages (`prefill_paged`), and `merge_states` merges. Causality applies on the last level
only, because shared keys precede all queries. A window would apply to each level by itself and be wrong, so it is
refused. When two levels are worth it: `cascade_gains`.
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
    """FlashInfer's name and arguments.

    Lifecycle: 1. made for a number of levels. 2. `plan`, once per forward pass: checks all levels before it writes to
    the first. 3. `run`, once per layer, launches only. With `use_cuda_graph` the first plan fixes on each level the
    batch size and the most query tokens; later plans write to the same memory.
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
            num_levels: at least 1.
            float_workspace_buffer: uint8, one dimension; its device is where everything runs.
            kv_layout: "NHD" or "HND".
            use_cuda_graph: keep addresses from plan to plan; then the buffers are needed, one of each per level.
            qo_indptr_buf_arr: int32 `[groups + 1]` each.
            paged_kv_indptr_buf_arr: int32 `[groups + 1]` each.
            paged_kv_indices_buf_arr: int32 each, room for the most pages that the level will have.
            paged_kv_last_page_len_buf_arr: int32 `[groups]` each.

        Raises:
            ValueError: no level, unknown layout, a buffer is missing or elsewhere, or the workspace is not of bytes.
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
        """Checks all levels and divides their work. One entry per level, the most shared first.

        Args:
            qo_indptr_arr: int32 `[groups + 1]` each, all ending at the number of query tokens.
            paged_kv_indptr_arr: int32 `[groups + 1]` each.
            paged_kv_indices_arr: int32 each.
            paged_kv_last_page_len: int32 `[groups]` each, in `1..page_size`.
            num_qo_heads: a multiple of num_kv_heads.
            num_kv_heads: KV heads.
            head_dim: of keys and values.
            page_size: tokens per page.
            causal: on the last level, right-aligned.
            pos_encoding_mode: only "NONE".
            use_fp16_qk_reduction: a hint, without effect: products are added up in float32.
            sm_scale: 1 / sqrt(head_dim) if None.
            window_left: only -1.
            logits_soft_cap: cap * tanh(x / cap) of the scores; None or 0: none.
            rope_scale: without effect, as in FlashInfer where nothing is rotated.
            rope_theta: the same.
            q_data_type: float16, bfloat16 or float32.
            kv_data_type: that of q (None), or float8_e4m3fn or float8_e5m2.

        Raises:
            ValueError: a window or an encoding of positions, a differing number of levels or of queries between levels,
                or a refusal of a level's wrapper. Names the argument; nothing was changed.
        """
        num_qo_heads, num_kv_heads, head_dim, page_size = require_sizes(
            num_qo_heads=num_qo_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, page_size=page_size
        )
        if require_integer("window_left", window_left, -1) != -1:
            raise ValueError(f"window_left must be -1: a window would apply per level, not {window_left}")
        if pos_encoding_mode != "NONE":
            raise ValueError(f'pos_encoding_mode must be "NONE": a level has no positions, not {pos_encoding_mode!r}')
        arrays = {
            "qo_indptr_arr": qo_indptr_arr,
            "paged_kv_indptr_arr": paged_kv_indptr_arr,
            "paged_kv_indices_arr": paged_kv_indices_arr,
            "paged_kv_last_page_len": paged_kv_last_page_len,
        }
        for name, array in arrays.items():
            if len(array) != len(self._levels):
                raise ValueError(f"{name} has {len(array)} levels, the wrapper {len(self._levels)}")
        tokens = [int(qo_indptr[-1]) for qo_indptr in qo_indptr_arr]
        if len(set(tokens)) != 1:
            raise ValueError(f"qo_indptr_arr ends at different tokens: {tokens}")
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
            v_scale: factor of the cache's values, the same.
            return_lse: whether lse is given back.
            sinks: float32 `[num_qo_heads]`, natural logarithms, counted once, on the last level.

        Returns:
            `[tokens, num_qo_heads, head_dim]` of q's dtype, and with `return_lse` float32 `[tokens, num_qo_heads]`, in
            base 2. A query that sees no key on any level gives zeros and -inf.

        Raises:
            ValueError: no plan, or an argument that differs from the plan; names it.
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
