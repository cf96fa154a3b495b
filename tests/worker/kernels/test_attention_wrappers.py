"""FlashInfer's wrappers, compared with the references: plan, run, CUDA graphs, and refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from quire_kernels.flashinfer.common import standard_alibi_slopes
from quire_kernels.flashinfer.decode import BatchDecodeWithPagedKVCacheWrapper
from quire_kernels.flashinfer.prefill import BatchPrefillWithPagedKVCacheWrapper
from quire_kernels.flashinfer.ragged import BatchPrefillWithRaggedKVCacheWrapper
from quire_kernels.ops.decode_paged import decode_paged_reference
from quire_kernels.ops.pack_mask import segment_packbits
from quire_kernels.ops.prefill_attention import prefill_paged_reference, prefill_ragged_reference
from quire_kernels.shared.fp8 import E4M3, E5M2
from quire_kernels.shared.options import AttentionOptions
from quire_kernels.shared.prefill_rows import Masking

from .attention_scene import Scene, assert_close


def workspace(device: torch.device, size: int = 8 << 20) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8, device=device)


def plan_decode(wrapper: BatchDecodeWithPagedKVCacheWrapper, scene: Scene, **changes: Any) -> None:
    sizes = (scene.heads, scene.kv_heads, scene.head_dim, scene.page_size)
    wrapper.plan(*scene.table, *sizes, **{"q_data_type": scene.dtype, **changes})


def plan_prefill(wrapper: BatchPrefillWithPagedKVCacheWrapper, scene: Scene, **changes: Any) -> None:
    sizes = (scene.heads, scene.kv_heads, scene.head_dim, scene.page_size)
    wrapper.plan(scene.qo_indptr, *scene.table, *sizes, **{"q_data_type": scene.dtype, **changes})


@pytest.mark.parametrize("layout", ["NHD", "HND pair"])
def test_decode_with_defaults_is_the_softmax(layout: str, device: torch.device) -> None:
    scene = Scene([30, 0, 200], layout=layout, device=device)
    wrapper = BatchDecodeWithPagedKVCacheWrapper(workspace(device), layout[:3])
    plan_decode(wrapper, scene)
    expected = decode_paged_reference(scene.q, scene.unpacked, *scene.table, scene.options())
    out, lse = wrapper.run(scene.q, scene.cache, return_lse=True)
    assert_close((out, lse), expected)
    assert torch.equal(wrapper.run(scene.q, scene.cache), out)
    given, given_lse = torch.zeros_like(out), torch.zeros_like(lse)
    result = wrapper.run(scene.q, scene.cache, out=given, lse=given_lse, return_lse=True)
    assert result[0] is given
    assert torch.equal(given, out)
    assert torch.equal(given_lse, lse)


@pytest.mark.parametrize("fp8", [E4M3, E5M2], ids=str)
def test_decode_with_all_options(fp8: torch.dtype, device: torch.device) -> None:
    scene = Scene([30, 7, 200], cache_dtype=fp8, device=device)
    wrapper = BatchDecodeWithPagedKVCacheWrapper(workspace(device))
    plan_decode(
        wrapper, scene, pos_encoding_mode="ALIBI", window_left=60, logits_soft_cap=4.0, kv_data_type=fp8, sm_scale=0.3
    )
    sinks, v_scale = scene.numbers(4), torch.tensor([0.5, 3.0], device=device)
    options = AttentionOptions(
        0.3 * 2.0 * 0.5, logits_soft_cap=4.0, window_left=60, sinks=sinks, v_scale=v_scale,
        alibi_slopes=standard_alibi_slopes(4, device),
    )  # fmt: skip
    actual = wrapper.run(scene.q, scene.cache, q_scale=2.0, k_scale=0.5, v_scale=v_scale, sinks=sinks, return_lse=True)
    assert_close(actual, decode_paged_reference(scene.q, scene.unpacked, *scene.table, options))


def test_standard_slopes_are_the_papers() -> None:
    device = torch.device("cpu")
    assert standard_alibi_slopes(8, device).tolist() == [2.0**-i for i in range(1, 9)]
    expected = [0.25, 0.0625, 2.0**-6, 2.0**-8, 0.5, 0.125]
    assert standard_alibi_slopes(6, device).tolist() == expected


def test_a_page_table_may_be_on_the_host_and_indices_longer_than_used(device: torch.device) -> None:
    scene = Scene([30, 5], device=device)
    wrapper = BatchDecodeWithPagedKVCacheWrapper(workspace(device))
    expected = decode_paged_reference(scene.q, scene.unpacked, *scene.table, scene.options())
    scene.indices = torch.cat([scene.indices.cpu(), torch.tensor([10**6], dtype=torch.int32)])
    scene.indptr, scene.last_page_len = scene.indptr.cpu(), scene.last_page_len.cpu()
    plan_decode(wrapper, scene)
    assert_close(wrapper.run(scene.q, scene.cache, return_lse=True), expected)


def test_a_graph_of_decode_sees_a_new_plan_where_the_old_one_was(device: torch.device) -> None:
    first, second = Scene([300, 5, 0], device=device), Scene([3, 20, 280], device=device)
    wrapper = BatchDecodeWithPagedKVCacheWrapper(
        workspace(device), use_cuda_graph=True, paged_kv_indptr_buffer=torch.zeros_like(first.indptr),
        paged_kv_indices_buffer=torch.zeros(64, dtype=torch.int32, device=device),
        paged_kv_last_page_len_buffer=torch.zeros_like(first.last_page_len),
    )  # fmt: skip
    plan_decode(wrapper, first)
    q, cache = first.q.clone(), torch.full((64, 2, 16, 2, 64), torch.nan, device=device)
    out, lse = torch.zeros_like(q), torch.zeros(3, 4, device=device)

    def run() -> None:
        wrapper.run(q, cache, out=out, lse=lse, return_lse=True)

    cache[: first.page_count] = first.cache
    replay = run
    if device.type == "cuda":
        run()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        replay = graph.replay
    for scene in (first, second, first):
        plan_decode(wrapper, scene)
        q.copy_(scene.q)
        cache[: scene.page_count] = scene.cache
        replay()
        assert_close((out, lse), decode_paged_reference(scene.q, scene.unpacked, *scene.table, scene.options()))


@pytest.mark.parametrize(
    ("message", "plan"),
    [
        ("^indices must be", {"indices": torch.tensor([-1], dtype=torch.int32)}),
        ("^last_page_len of request . must be in 1..16", {"last_page_len": torch.tensor([17], dtype=torch.int32)}),
        ("^indptr must not decrease", {"indptr": torch.tensor([0, -1], dtype=torch.int32)}),
        ("^num_qo_heads", {"num_qo_heads": 5}),
        ("^pos_encoding_mode", {"pos_encoding_mode": "ROPE_LLAMA"}),
        ("^alibi_slopes needs", {"alibi_slopes": torch.ones(4)}),
        ("^window_left", {"window_left": -3}),
        ("^logits_soft_cap", {"logits_soft_cap": -3.0}),
        ("^q_data_type", {"q_data_type": "float17"}),
        ("^q_data_type", {"q_data_type": torch.float64}),
        ("^kv_data_type", {"kv_data_type": torch.float16}),
    ],
)
def test_invalid_plans_are_refused_by_name(message: str, plan: dict[str, Any], device: torch.device) -> None:
    scene = Scene([5], device=device)
    arguments = {
        "indptr": scene.indptr, "indices": scene.indices, "last_page_len": scene.last_page_len, "num_qo_heads": 4,
        "num_kv_heads": 2, "head_dim": 64, "page_size": 16, "q_data_type": torch.float32,
    }  # fmt: skip
    with pytest.raises(ValueError, match=message):
        BatchDecodeWithPagedKVCacheWrapper(workspace(device)).plan(**{**arguments, **plan})


def test_a_run_must_fit_its_plan(device: torch.device) -> None:
    scene = Scene([5, 40], device=device)
    wrapper = BatchDecodeWithPagedKVCacheWrapper(workspace(device))
    with pytest.raises(ValueError, match="needs a plan"):
        wrapper.run(scene.q, scene.cache)
    plan_decode(wrapper, scene)
    for message, q, cache in (
        ("^q must be", scene.q[:1], scene.cache),
        ("^q must be", scene.q.half(), scene.cache),
        ("^paged_kv_cache dtype", scene.q, scene.cache.half()),
        ("^paged_kv_cache page_size", scene.q, scene.cache[:, :, :8]),
        ("^paged_kv_cache page_size", scene.q, scene.cache.transpose(2, 3)),
        ("^indices must be in 0..0", scene.q, scene.cache[:1]),
    ):
        with pytest.raises(ValueError, match=message):
            wrapper.run(q, cache)


def test_a_page_outside_the_cache_is_refused_under_the_name_that_a_prefill_plan_has_for_it(
    device: torch.device,
) -> None:
    scene = Scene([5, 40], query_lengths=[2, 3], device=device)
    wrapper = BatchPrefillWithPagedKVCacheWrapper(workspace(device))
    wrapper.plan(scene.qo_indptr, *scene.table, 4, 2, 64, 16, q_data_type=torch.float32)
    with pytest.raises(ValueError, match=r"^paged_kv_indices must be in 0..0"):
        wrapper.run(scene.q, scene.cache[:1])


def test_wrappers_refuse_what_they_cannot_work_with(device: torch.device) -> None:
    scene = Scene([5], device=device)
    for wrapper in (
        BatchDecodeWithPagedKVCacheWrapper,
        BatchPrefillWithPagedKVCacheWrapper,
        BatchPrefillWithRaggedKVCacheWrapper,
    ):
        with pytest.raises(ValueError, match=r"^kv_layout"):
            wrapper(workspace(device), "NDH")
        with pytest.raises(ValueError, match=r"^float_workspace_buffer"):
            wrapper(workspace(device).float())
        with pytest.raises(ValueError, match=r"^use_cuda_graph needs"):
            wrapper(workspace(device), use_cuda_graph=True)
    with pytest.raises(ValueError, match=r"^float_workspace_buffer must have at least .* bytes, not 64"):
        plan_decode(BatchDecodeWithPagedKVCacheWrapper(workspace(device, 64)), scene)


@pytest.mark.parametrize("causal", [True, False])
def test_prefill_with_defaults_is_the_softmax(causal: bool, device: torch.device) -> None:
    scene = Scene([30, 0, 90], query_lengths=[9, 1, 40], device=device)
    wrapper = BatchPrefillWithPagedKVCacheWrapper(workspace(device))
    plan_prefill(wrapper, scene, causal=causal)
    expected = prefill_paged_reference(
        scene.q, scene.unpacked, scene.qo_indptr, *scene.table, scene.options(), Masking(causal=causal)
    )
    assert_close(wrapper.run(scene.q, scene.cache, return_lse=True), expected)


@pytest.mark.parametrize("packed", [True, False])
def test_prefill_under_a_mask_forgets_causal(packed: bool, device: torch.device) -> None:
    scene = Scene([30, 7], query_lengths=[9, 3], device=device)
    mask = (torch.rand(9 * 30 + 3 * 7) < 0.5).to(device)
    indptr = torch.tensor([0, 270, 291], device=device)
    given = {"packed_custom_mask": segment_packbits(mask, indptr, "little")[0]} if packed else {"custom_mask": mask}
    wrapper = BatchPrefillWithPagedKVCacheWrapper(workspace(device))
    plan_prefill(wrapper, scene, causal=True, **given)
    masking = Masking(custom_mask=mask, mask_indptr=indptr)
    expected = prefill_paged_reference(scene.q, scene.unpacked, scene.qo_indptr, *scene.table, scene.options(), masking)
    assert_close(wrapper.run(scene.q, scene.cache, return_lse=True), expected)


def test_a_graph_of_prefill_sees_a_new_plan_where_the_old_one_was(device: torch.device) -> None:
    first = Scene([90, 5], query_lengths=[30, 5], device=device)
    second = Scene([20, 33], query_lengths=[2, 33], device=device)
    buffers = [torch.zeros(n, dtype=torch.int32, device=device) for n in (3, 3, 32, 2)]
    names = ("qo_indptr_buf", "paged_kv_indptr_buf", "paged_kv_indices_buf", "paged_kv_last_page_len_buf")
    wrapper = BatchPrefillWithPagedKVCacheWrapper(
        workspace(device), use_cuda_graph=True, **dict(zip(names, buffers, strict=True))
    )
    for scene in (first, second, first):
        plan_prefill(wrapper, scene, causal=True)
        expected = prefill_paged_reference(
            scene.q, scene.unpacked, scene.qo_indptr, *scene.table, scene.options(), Masking(causal=True)
        )
        assert_close(wrapper.run(scene.q, scene.cache, return_lse=True), expected)
        assert buffers[0].tolist() == scene.qo_indptr.tolist()
    for message, scene, changes in (
        (
            "^qo_indptr must have at most .* tokens, like the CUDA graph, not 36",
            Scene([40, 5], query_lengths=[31, 5], device=device),
            {},
        ),
        ("^use_cuda_graph: plan", first, {"causal": False}),
        ("^use_cuda_graph: plan", first, {"window_left": 3}),
        ("must have 2 requests, like the CUDA graph", Scene([40], query_lengths=[31], device=device), {}),
    ):
        with pytest.raises(ValueError, match=message):
            plan_prefill(wrapper, scene, **{"causal": True, **changes})


@pytest.mark.parametrize(
    ("message", "plan"),
    [
        ("^custom_mask must have 69 entries", {"custom_mask": torch.ones(70, dtype=torch.bool)}),
        ("^custom_mask must be a flat", {"custom_mask": torch.ones(69)}),
        ("^packed_custom_mask must have 9", {"packed_custom_mask": torch.ones(8, dtype=torch.uint8)}),
        (
            "custom_mask, not both",
            {"custom_mask": torch.ones(69, dtype=torch.bool), "packed_custom_mask": torch.ones(9, dtype=torch.uint8)},
        ),
        ("^chunk_size", {"chunk_size": -1}),
        ("^paged_kv_last_page_len", {"paged_kv_last_page_len": torch.tensor([9, 0], dtype=torch.int32)}),
        ("^qo_indptr must have 3", {"qo_indptr": torch.tensor([0, 7], dtype=torch.int32)}),
        ("^qo_indptr must not decrease", {"qo_indptr": torch.tensor([0, 7, 6], dtype=torch.int32)}),
    ],
)
def test_invalid_prefills_are_refused_by_name(message: str, plan: dict[str, Any], device: torch.device) -> None:
    scene = Scene([9, 3], query_lengths=[7, 2], device=device)
    arguments = {
        "qo_indptr": scene.qo_indptr, "paged_kv_indptr": scene.indptr, "paged_kv_indices": scene.indices,
        "paged_kv_last_page_len": scene.last_page_len, "num_qo_heads": 4, "num_kv_heads": 2, "head_dim_qk": 64,
        "page_size": 16, "q_data_type": torch.float32,
    }  # fmt: skip
    with pytest.raises(ValueError, match=message):
        BatchPrefillWithPagedKVCacheWrapper(workspace(device)).plan(**{**arguments, **plan})


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_ragged_prefill_is_the_softmax(layout: str, device: torch.device) -> None:
    q = torch.randn(12, 4, 192, device=device)
    k, v = torch.randn(20, 2, 192, device=device), torch.randn(20, 2, 128, device=device)
    qo_indptr, kv_indptr = (torch.tensor(x, dtype=torch.int32, device=device) for x in ([0, 9, 12], [0, 9, 20]))
    wrapper = BatchPrefillWithRaggedKVCacheWrapper(workspace(device), layout)
    wrapper.plan(qo_indptr, kv_indptr, 4, 2, 192, 128, causal=True, q_data_type="float32")
    given = (k, v) if layout == "NHD" else (k.transpose(0, 1).contiguous(), v.transpose(0, 1).contiguous())
    actual = wrapper.run(q, *given, return_lse=True)
    options = AttentionOptions(192**-0.5)
    expected = prefill_ragged_reference(q, k, v, qo_indptr, kv_indptr, options, Masking(causal=True))
    assert_close(actual, expected)
    with pytest.raises(ValueError, match=r"^k must be"):
        wrapper.run(q, k[:19].expand(19, 2, 192), v)
    with pytest.raises(ValueError, match=r"^v must be"):
        wrapper.run(q, *given[:1], given[1].half())


@pytest.mark.parametrize("packed", [True, False])
def test_ragged_prefill_under_a_mask_forgets_causal(packed: bool, device: torch.device) -> None:
    q, k, v = (torch.randn(count, heads, 64, device=device) for count, heads in ((12, 4), (20, 2), (20, 2)))
    qo_indptr, kv_indptr = (torch.tensor(x, dtype=torch.int32, device=device) for x in ([0, 9, 12], [0, 13, 20]))
    # The first request's 9 * 13 = 117 entries are not a multiple of 8. Packed, the second request starts at a new byte.
    mask = (torch.rand(9 * 13 + 3 * 7) < 0.5).to(device)
    mask[26:39] = False  # One query sees no key.
    mask_indptr = torch.tensor([0, 117, 138], device=device)
    given = (
        {"packed_custom_mask": segment_packbits(mask, mask_indptr, "little")[0]} if packed else {"custom_mask": mask}
    )
    wrapper = BatchPrefillWithRaggedKVCacheWrapper(workspace(device))
    wrapper.plan(qo_indptr, kv_indptr, 4, 2, 64, causal=True, q_data_type=torch.float32, **given)
    out, lse = wrapper.run(q, k, v, return_lse=True)
    masking = Masking(custom_mask=mask, mask_indptr=mask_indptr)
    options = AttentionOptions(64**-0.5)
    assert_close((out, lse), prefill_ragged_reference(q, k, v, qo_indptr, kv_indptr, options, masking))
    assert out[2].eq(0).all()
    assert lse[2].eq(-torch.inf).all()


@pytest.mark.parametrize("fp8", [E4M3, E5M2], ids=str)
def test_ragged_prefill_with_all_options(fp8: torch.dtype, device: torch.device) -> None:
    q, k, v = (torch.randn(count, heads, 80, device=device) for count, heads in ((12, 10), (20, 2), (20, 2)))
    qo_indptr, kv_indptr = (torch.tensor(x, dtype=torch.int32, device=device) for x in ([0, 9, 9, 12], [0, 13, 15, 20]))
    wrapper = BatchPrefillWithRaggedKVCacheWrapper(workspace(device))
    wrapper.plan(
        qo_indptr, kv_indptr, 10, 2, 80, causal=True, pos_encoding_mode="ALIBI", window_left=6, logits_soft_cap=4.0,
        sm_scale=0.3, q_data_type=torch.float32, kv_data_type=fp8,
    )  # fmt: skip
    sinks, v_scale = torch.randn(10, device=device), torch.tensor([0.5, 3.0], device=device)
    k, v = k.to(fp8), v.to(fp8)
    options = AttentionOptions(
        0.3 * 2.0 * 0.5, logits_soft_cap=4.0, window_left=6, sinks=sinks, v_scale=v_scale,
        alibi_slopes=standard_alibi_slopes(10, device),
    )  # fmt: skip
    actual = wrapper.run(q, k, v, q_scale=2.0, k_scale=0.5, v_scale=v_scale, sinks=sinks, return_lse=True)
    assert_close(actual, prefill_ragged_reference(q, k, v, qo_indptr, kv_indptr, options, Masking(causal=True)))
