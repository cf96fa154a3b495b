"""FlashInfer's arguments that have an effect: scales, windows, bases of lse, dtypes, and a fixed order of keys."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from quire_kernels.flashinfer import (
    BatchDecodeWithPagedKVCacheWrapper,
    BatchPrefillWithPagedKVCacheWrapper,
    BatchPrefillWithRaggedKVCacheWrapper,
)
from quire_kernels.ops.decode_paged import decode_paged_reference
from quire_kernels.ops.prefill_attention import prefill_paged_reference
from quire_kernels.shared.prefill_rows import Masking
from quire_kernels.shared.reference import gather

from .attention_scene import Scene, assert_close

CAUSAL = Masking(causal=True)


def workspace(device: torch.device) -> torch.Tensor:
    return torch.empty(8 << 20, dtype=torch.uint8, device=device)


def decode_wrapper(scene: Scene, **changes: Any) -> BatchDecodeWithPagedKVCacheWrapper:
    wrapper = BatchDecodeWithPagedKVCacheWrapper(workspace(scene.device))
    sizes = (scene.heads, scene.kv_heads, scene.head_dim, scene.page_size)
    wrapper.plan(*scene.table, *sizes, **{"q_data_type": scene.dtype, **changes})
    return wrapper


def prefill_wrapper(scene: Scene, *more: Any, **changes: Any) -> BatchPrefillWithPagedKVCacheWrapper:
    wrapper = BatchPrefillWithPagedKVCacheWrapper(workspace(scene.device))
    sizes = (scene.heads, scene.kv_heads, scene.head_dim, scene.page_size)
    wrapper.plan(scene.qo_indptr, *scene.table, *sizes, *more, **{"q_data_type": scene.dtype, **changes})
    return wrapper


def prefill_expected(scene: Scene, **changes: Any) -> tuple[torch.Tensor, torch.Tensor]:
    options = scene.options(**changes)
    return prefill_paged_reference(scene.q, scene.unpacked, scene.qo_indptr, *scene.table, options, CAUSAL)


def test_arguments_given_by_place_are_where_flashinfer_has_them(device: torch.device) -> None:
    scene = Scene([30, 7], query_lengths=[9, 3], device=device)
    # The arguments are: head_dim_vo, custom_mask, packed_custom_mask, causal, pos_encoding_mode, use_fp16_qk_reduction,
    # sm_scale, window_left, logits_soft_cap, rope_scale, rope_theta.
    wrapper = prefill_wrapper(scene, None, None, None, True, "NONE", False, 0.3, 6, 2.0, 1.0, 1e4)
    expected = prefill_expected(scene, sm_scale=0.3, window_left=6, logits_soft_cap=2.0)
    assert_close(wrapper.run(scene.q, scene.cache, return_lse=True), expected)
    decode = Scene([30, 7], device=device)
    planned = BatchDecodeWithPagedKVCacheWrapper(workspace(device), "NHD", False, True)
    # The arguments are: pos_encoding_mode, window_left, logits_soft_cap, q_data_type, kv_data_type, o_data_type,
    # data_type, sm_scale.
    more = ("NONE", 6, 2.0, torch.float32, None, torch.float32, None, 0.3)
    planned.plan(*decode.table, 4, 2, 64, 16, *more)
    options = decode.options(sm_scale=0.3, window_left=6, logits_soft_cap=2.0)
    reference = decode_paged_reference(decode.q, decode.unpacked, *decode.table, options)
    assert_close(planned.run(decode.q, decode.cache, return_lse=True), reference)


def test_scales_may_be_tensors_that_nobody_has_to_wait_for(device: torch.device) -> None:
    scene = Scene([30, 7], device=device)
    wrapper = decode_wrapper(scene)
    k_scale = torch.tensor([0.5, 3.0], device=device)
    expected = decode_paged_reference(scene.q, scene.unpacked, *scene.table, scene.options(k_scale=k_scale * 2))
    for q_scale in (2.0, torch.tensor(2.0, device=device)):
        actual = wrapper.run(scene.q, scene.cache, q_scale=q_scale, k_scale=k_scale, return_lse=True)
        assert_close(actual, expected)
    alone = wrapper.run(scene.q, scene.cache, q_scale=torch.tensor([2.0], device=device), k_scale=0.5)
    assert torch.equal(alone, wrapper.run(scene.q, scene.cache))
    with pytest.raises(ValueError, match=r"^q_scale must have 1 or 2 entries"):
        wrapper.run(scene.q, scene.cache, q_scale=torch.ones(3, device=device))


def test_a_window_may_differ_per_layer_of_prefill_and_not_of_decode(device: torch.device) -> None:
    scene = Scene([30, 7], query_lengths=[9, 3], device=device)
    wrapper = prefill_wrapper(scene, causal=True, window_left=6)
    for window in (None, 6, 2, -1):
        expected = prefill_expected(scene, window_left=6 if window is None else window)
        assert_close(wrapper.run(scene.q, scene.cache, window_left=window, return_lse=True), expected)
    with pytest.raises(ValueError, match=r"^window_left must be at least -1"):
        wrapper.run(scene.q, scene.cache, window_left=-2)
    decode = Scene([30, 7], device=device)
    planned = decode_wrapper(decode, window_left=6)
    assert torch.equal(planned.run(decode.q, decode.cache, window_left=6), planned.run(decode.q, decode.cache))
    with pytest.raises(ValueError, match=r"^window_left must be 6, as planned, not 5"):
        planned.run(decode.q, decode.cache, window_left=5)


def test_lse_is_given_in_the_base_that_is_asked_for(device: torch.device) -> None:
    scene = Scene([30, 0], query_lengths=[9, 1], device=device)
    wrapper = prefill_wrapper(scene, causal=True)
    out, lse = wrapper.run_return_lse(scene.q, scene.cache)
    given = torch.zeros_like(lse)
    natural = wrapper.run(scene.q, scene.cache, lse=given, return_lse=True, lse_base="ln")
    assert natural[1] is given
    assert torch.equal(natural[0], out)
    torch.testing.assert_close(given, lse * math.log(2.0))
    # The call writes the given `lse`, although the call does not return the lse.
    wrapper.run(scene.q, scene.cache, lse=given.zero_(), lse_base="ln")
    torch.testing.assert_close(given, lse * math.log(2.0))
    ragged = BatchPrefillWithRaggedKVCacheWrapper(workspace(device))
    ragged.begin_forward(scene.index([0, 3]), scene.index([0, 5]), 4, 2, 64, q_data_type="float32")
    q, k, v = (torch.randn(length, heads, 64, device=device) for length, heads in ((3, 4), (5, 2), (5, 2)))
    base_2, base_e = (ragged.run_return_lse(q, k, v, lse_base=base)[1] for base in ("log2", "ln"))
    torch.testing.assert_close(base_e, base_2 * math.log(2.0))
    for run in (lambda: wrapper.run(scene.q, scene.cache, lse_base="2"), lambda: ragged.run(q, k, v, lse_base="e")):
        with pytest.raises(ValueError, match=r"^lse_base must be one of"):
            run()


def test_results_have_the_dtype_of_queries_and_no_other(device: torch.device) -> None:
    scene = Scene([30, 7], query_lengths=[9, 3], device=device)
    prefill_wrapper(scene, o_data_type="float32")
    for plan in (
        lambda: prefill_wrapper(scene, o_data_type=torch.float16),
        lambda: decode_wrapper(Scene([5], device=device), o_data_type=torch.float16),
        lambda: BatchPrefillWithRaggedKVCacheWrapper(workspace(device)).plan(
            scene.index([0, 3]), scene.index([0, 5]), 4, 2, 64, o_data_type="float32"
        ),
    ):
        with pytest.raises(ValueError, match=r"^o_data_type must be q_data_type"):
            plan()


def test_data_type_is_that_of_queries_and_cache_where_they_are_not_given(device: torch.device) -> None:
    scene = Scene([30, 7], dtype=torch.bfloat16, device=device)
    wrapper = decode_wrapper(scene, q_data_type=None, data_type="bfloat16")
    expected = decode_paged_reference(scene.q, scene.unpacked, *scene.table, scene.options())
    assert_close(wrapper.run(scene.q, scene.cache, return_lse=True), expected)
    with pytest.raises(ValueError, match=r"^kv_data_type must be"):
        decode_wrapper(scene, q_data_type="float16", data_type="bfloat16")


@pytest.mark.parametrize("new", [[40, 9], [1, 1]], ids=["prompts", "decode"])
def test_a_query_sees_its_own_chunk_through_both_prefill_wrappers(new: list[int], device: torch.device) -> None:
    lengths = [90, 30]
    scene, indptr = Scene(lengths, query_lengths=new, device=device), [0, 90, 120]
    masking = Masking(causal=True, chunk_size=32)
    options = scene.options()
    expected = prefill_paged_reference(scene.q, scene.unpacked, scene.qo_indptr, *scene.table, options, masking)
    paged = prefill_wrapper(scene, causal=True, chunk_size=32)
    assert_close(paged.run(scene.q, scene.cache, return_lse=True), expected)
    ragged = BatchPrefillWithRaggedKVCacheWrapper(workspace(device))
    heads = (scene.heads, scene.kv_heads, scene.head_dim)
    ragged.plan(scene.qo_indptr, scene.index(indptr), *heads, causal=True, chunk_size=32, q_data_type=scene.dtype)
    keys = [gather(scene.unpacked, *scene.table, request) for request in range(len(lengths))]
    k, v = (torch.cat(parts) for parts in zip(*keys, strict=True))
    assert_close(ragged.run(scene.q, k, v, return_lse=True), expected)


def test_without_splits_a_request_has_the_same_bits_in_every_batch(device: torch.device) -> None:
    scene = Scene([700, 7, 300], page_size=4, device=device)
    together = decode_wrapper(scene, disable_split_kv=True).run_return_lse(scene.q, scene.cache)
    expected = decode_paged_reference(scene.q, scene.unpacked, *scene.table, scene.options())
    assert_close(together, expected)
    split = decode_wrapper(scene).run(scene.q, scene.cache)
    assert not torch.equal(split[0], together[0][0])  # By default long requests are split, so rounding differs.
    for request in range(3):
        start, stop = scene.indptr[request : request + 2].tolist()
        alone = BatchDecodeWithPagedKVCacheWrapper(workspace(device))
        table = (scene.index([0, stop - start]), scene.indices[start:stop], scene.last_page_len[request : request + 1])
        alone.plan(*table, 4, 2, 64, 4, q_data_type="float32", disable_split_kv=True)
        out, lse = alone.run_return_lse(scene.q[request : request + 1], scene.cache)
        assert torch.equal(out[0], together[0][request])
        assert torch.equal(lse[0], together[1][request])
