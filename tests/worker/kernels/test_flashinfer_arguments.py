"""Every argument of FlashInfer's calls, by name and by position, is accepted, or refused with its name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import quire_kernels
import torch
from quire_kernels.flashinfer import (
    BatchDecodeWithPagedKVCacheWrapper,
    BatchMLAPagedAttentionWrapper,
    BatchPrefillWithPagedKVCacheWrapper,
    BatchPrefillWithRaggedKVCacheWrapper,
    arguments,
)
from quire_kernels.flashinfer.arguments import Rule

# Signatures of FlashInfer 0.7.2.post1; names after a * are keyword-only. The decode wrapper's plan lists the arguments
# that may still be positional, in order.
FLASHINFER = {
    "BatchDecodeWithPagedKVCacheWrapper.__init__": """
        float_workspace_buffer kv_layout use_cuda_graph use_tensor_cores paged_kv_indptr_buffer
        paged_kv_indices_buffer paged_kv_last_page_len_buffer backend jit_args
    """,
    "BatchDecodeWithPagedKVCacheWrapper.plan": """
        indptr indices last_page_len num_qo_heads num_kv_heads head_dim page_size pos_encoding_mode
        window_left logits_soft_cap q_data_type kv_data_type o_data_type data_type sm_scale rope_scale
        rope_theta non_blocking block_tables seq_lens fixed_split_size disable_split_kv q_len_per_req *
        window_right is_causal
    """,
    "BatchDecodeWithPagedKVCacheWrapper.run": """
        q paged_kv_cache * q_scale k_scale v_scale out lse return_lse enable_pdl window_left sinks
        q_len_per_req skip_softmax_threshold_scale_factor kv_cache_sf
    """,
    "BatchPrefillWithPagedKVCacheWrapper.__init__": """
        float_workspace_buffer kv_layout use_cuda_graph qo_indptr_buf paged_kv_indptr_buf
        paged_kv_indices_buf paged_kv_last_page_len_buf custom_mask_buf mask_indptr_buf backend jit_args
        jit_kwargs variant_owns_mask
    """,
    "BatchPrefillWithPagedKVCacheWrapper.plan": """
        qo_indptr paged_kv_indptr paged_kv_indices paged_kv_last_page_len num_qo_heads num_kv_heads
        head_dim_qk page_size head_dim_vo custom_mask packed_custom_mask causal pos_encoding_mode
        use_fp16_qk_reduction sm_scale window_left logits_soft_cap rope_scale rope_theta q_data_type
        kv_data_type o_data_type non_blocking prefix_len_ptr token_pos_in_items_ptr token_pos_in_items_len
        max_item_len_ptr seq_lens seq_lens_q block_tables max_token_per_sequence max_sequence_kv
        fixed_split_size disable_split_kv uniform_q_len
    """,
    "BatchPrefillWithPagedKVCacheWrapper.run": """
        q paged_kv_cache * q_scale k_scale v_scale out lse return_lse lse_base lse_layout enable_pdl
        window_left sinks kv_cache_sf skip_softmax_threshold_scale_factor use_fp16_softmax uses_spcompress
    """,
    "BatchPrefillWithRaggedKVCacheWrapper.__init__": """
        float_workspace_buffer kv_layout use_cuda_graph qo_indptr_buf kv_indptr_buf custom_mask_buf
        mask_indptr_buf backend jit_args jit_kwargs variant_owns_mask
    """,
    "BatchPrefillWithRaggedKVCacheWrapper.plan": """
        qo_indptr kv_indptr num_qo_heads num_kv_heads head_dim_qk head_dim_vo custom_mask packed_custom_mask
        causal pos_encoding_mode use_fp16_qk_reduction window_left logits_soft_cap sm_scale rope_scale
        rope_theta q_data_type kv_data_type o_data_type non_blocking prefix_len_ptr token_pos_in_items_ptr
        token_pos_in_items_len max_item_len_ptr fixed_split_size disable_split_kv seq_lens seq_lens_q
        max_token_per_sequence max_sequence_kv v_indptr o_indptr uniform_q_len
    """,
    "BatchPrefillWithRaggedKVCacheWrapper.run": """
        q k v * q_scale k_scale v_scale o_scale out lse return_lse lse_base lse_layout enable_pdl
        kv_cache_sf
    """,
    "BatchMLAPagedAttentionWrapper.__init__": """
        float_workspace_buffer use_cuda_graph qo_indptr kv_indptr kv_indices kv_len_arr backend
    """,
    "BatchMLAPagedAttentionWrapper.plan": """
        qo_indptr kv_indptr kv_indices kv_len_arr num_heads head_dim_ckv head_dim_kpe page_size causal
        sm_scale q_data_type kv_data_type use_profiler * metadata cum_seq_lens_q block_tables seq_lens
        max_q_len query_layout kv_cache_layout lse_mode output_dtype output_scale scale_mode skip_softmax
        enable_pdl use_sinks
    """,
    "BatchMLAPagedAttentionWrapper.run": """
        q_nope q_pe ckv_cache kpe_cache out lse return_lse profiler_buffer kv_len page_table
        return_lse_base_on_e o_scale * query kv_cache ckv_scale ckv_scale_arr kpe_scale sinks
        skip_softmax_threshold_scale_factor bmm1_scale bmm2_scale
    """,
    "MultiLevelCascadeAttentionWrapper.__init__": """
        num_levels float_workspace_buffer kv_layout use_cuda_graph qo_indptr_buf_arr paged_kv_indptr_buf_arr
        paged_kv_indices_buf_arr paged_kv_last_page_len_buf_arr
    """,
    "MultiLevelCascadeAttentionWrapper.plan": """
        qo_indptr_arr paged_kv_indptr_arr paged_kv_indices_arr paged_kv_last_page_len num_qo_heads
        num_kv_heads head_dim page_size causal pos_encoding_mode use_fp16_qk_reduction sm_scale window_left
        logits_soft_cap rope_scale rope_theta q_data_type kv_data_type
    """,
    "MultiLevelCascadeAttentionWrapper.run": """
        q paged_kv_cache
    """,
    "get_batch_indices_positions": """
        append_indptr seq_lens nnz batch_indices positions
    """,
    "get_seq_lens": """
        kv_indptr kv_last_page_len page_size
    """,
    "append_paged_kv_cache": """
        append_key append_value batch_indices positions paged_kv_cache kv_indices kv_indptr kv_last_page_len
        kv_layout
    """,
    "packbits": """
        x bitorder
    """,
    "segment_packbits": """
        x indptr bitorder
    """,
    "merge_state": """
        v_a s_a v_b s_b
    """,
    "merge_state_in_place": """
        v s v_other s_other mask
    """,
    "merge_states": """
        v s
    """,
}

TABLES = {
    "BatchDecodeWithPagedKVCacheWrapper": ("CONSTRUCTOR", "DECODE_PLAN", "DECODE_RUN"),
    "BatchPrefillWithPagedKVCacheWrapper": ("PREFILL_CONSTRUCTOR", "PREFILL_PLAN", "PREFILL_RUN"),
    "BatchPrefillWithRaggedKVCacheWrapper": ("PREFILL_CONSTRUCTOR", "RAGGED_PLAN", "RAGGED_RUN"),
    "BatchMLAPagedAttentionWrapper": ("MLA_CONSTRUCTOR", "MLA_PLAN", "MLA_RUN"),
}
METHODS = ("__init__", "plan", "run")


def rules_of(call: str) -> Mapping[str, Rule]:
    wrapper, _, method = call.partition(".")
    if wrapper not in TABLES:
        return {}
    return getattr(arguments, TABLES[wrapper][METHODS.index(method)])


@pytest.mark.parametrize("call", FLASHINFER)
def test_names_and_their_order_are_flashinfers(call: str) -> None:
    place, _, keyword = FLASHINFER[call].partition("*")
    theirs = place.split()
    target = quire_kernels
    for part in call.split("."):
        target = getattr(target, part)
    parameters = [p for p in inspect.signature(target).parameters.values() if p.name != "self"]
    by_place = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert by_place[: len(theirs)] == theirs[: len(by_place)]
    # Quire's methods take no further positional arguments, because FlashInfer might add arguments in these positions.
    if "." in call:
        assert len(by_place) <= len(theirs)
    ours = {p.name for p in parameters if p.kind is not p.VAR_KEYWORD}
    rules = set(rules_of(call))
    assert set(theirs + keyword.split()) - ours - rules == set()
    assert rules <= set(theirs + keyword.split()) - ours


class Calls:
    """Calls of each wrapper for one request of 5 tokens; each call accepts further arguments."""

    def __init__(self, device: torch.device) -> None:
        def int32(*values: int) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int32, device=device)

        workspace = torch.zeros(1 << 20, dtype=torch.uint8, device=device)
        q, pages = torch.randn(1, 2, 16, device=device), torch.randn(2, 2, 4, 1, 16, device=device)
        k, v = torch.randn(2, 5, 1, 16, device=device)
        table = (int32(0, 2), int32(1, 0), int32(1))
        dtypes = {"q_data_type": torch.float32}
        latents = (q, q[..., :16], pages[:, 0, :, 0], pages[:, 1, :, 0])
        self.constructors: dict[str, Callable[..., Any]] = {
            "BatchDecodeWithPagedKVCacheWrapper": lambda **more: BatchDecodeWithPagedKVCacheWrapper(workspace, **more),
            "BatchPrefillWithPagedKVCacheWrapper": lambda **more: BatchPrefillWithPagedKVCacheWrapper(
                workspace, **more
            ),
            "BatchPrefillWithRaggedKVCacheWrapper": lambda **more: BatchPrefillWithRaggedKVCacheWrapper(
                workspace, **more
            ),
            "BatchMLAPagedAttentionWrapper": lambda **more: BatchMLAPagedAttentionWrapper(workspace, **more),
        }
        self.plans: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
            "BatchDecodeWithPagedKVCacheWrapper": ((*table, 2, 1, 16, 4), dtypes),
            "BatchPrefillWithPagedKVCacheWrapper": ((int32(0, 1), *table, 2, 1, 16, 4), dtypes),
            "BatchPrefillWithRaggedKVCacheWrapper": ((int32(0, 1), int32(0, 5), 2, 1, 16), dtypes),
            "BatchMLAPagedAttentionWrapper": (
                (int32(0, 1), int32(0, 2), int32(1, 0), int32(5), 2, 16, 16, 4, False, 0.25, *[torch.float32] * 2),
                {},
            ),
        }
        self.runs: dict[str, tuple[torch.Tensor, ...]] = {
            "BatchDecodeWithPagedKVCacheWrapper": (q, pages),
            "BatchPrefillWithPagedKVCacheWrapper": (q, pages),
            "BatchPrefillWithRaggedKVCacheWrapper": (q, k, v),
            "BatchMLAPagedAttentionWrapper": latents,
        }

    def all_three(
        self, name: str, constructor: dict[str, Any], plan: dict[str, Any], run: dict[str, Any]
    ) -> torch.Tensor:
        wrapper = self.constructors[name](**constructor)
        arguments, options = self.plans[name]
        wrapper.plan(*arguments, **options, **plan)
        result: torch.Tensor = wrapper.run(*self.runs[name], **run)
        return result


@pytest.mark.parametrize("name", TABLES)
def test_what_is_accepted_changes_nothing(name: str, device: torch.device) -> None:
    calls = Calls(device)
    plain = calls.all_three(name, {}, {}, {})
    for pick in (0, -1):
        given = []
        for method in METHODS:
            rules = rules_of(f"{name}.{method}")
            given.append(
                {key: "some hint" if rule.allowed is None else rule.allowed[pick] for key, rule in rules.items()}
            )
        assert torch.equal(calls.all_three(name, *given), plain)


@pytest.mark.parametrize(
    ("name", "method", "argument"),
    [
        (name, method, argument)
        for name in TABLES
        for method in METHODS
        for argument, rule in rules_of(f"{name}.{method}").items()
        if rule.allowed is not None
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(
    name: str, method: str, argument: str, device: torch.device
) -> None:
    calls = Calls(device)
    for value in (torch.ones(1), "something", 7):
        given: list[dict[str, Any]] = [{}, {}, {}]
        given[METHODS.index(method)] = {argument: value}
        with pytest.raises(ValueError, match=rf"^{argument} must be .*, not (a tensor|'something'|7): \w"):
            calls.all_three(name, *given)


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("method", METHODS)
def test_what_flashinfer_does_not_know_either_is_a_type_error(name: str, method: str, device: torch.device) -> None:
    given: list[dict[str, Any]] = [{}, {}, {}]
    given[METHODS.index(method)] = {"use_tensor_scores": True}
    with pytest.raises(TypeError, match="unexpected keyword argument 'use_tensor_scores'"):
        Calls(device).all_three(name, *given)
