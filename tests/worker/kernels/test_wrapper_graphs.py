"""Plans of a CUDA graph keep the batch size, and write all of their tensors to the same memory, or none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from quire_kernels.flashinfer import (
    BatchDecodeWithPagedKVCacheWrapper,
    BatchPrefillWithPagedKVCacheWrapper,
    BatchPrefillWithRaggedKVCacheWrapper,
)
from quire_kernels.ops.prefill_attention import prefill_ragged_reference
from quire_kernels.shared.options import AttentionOptions
from quire_kernels.shared.prefill_rows import Masking
from quire_kernels.shared.reference import TOLERANCE

from .attention_scene import Scene, assert_close

Buffers = dict[str, torch.Tensor]


def int32(sizes: dict[str, int], device: torch.device) -> Buffers:
    return {name: torch.zeros(size, dtype=torch.int32, device=device) for name, size in sizes.items()}


def workspace(device: torch.device) -> torch.Tensor:
    return torch.empty(8 << 20, dtype=torch.uint8, device=device)


class Ragged:
    """Queries and keys of requests with some lengths, without pages."""

    def __init__(self, new: list[int], lengths: list[int], device: torch.device) -> None:
        self.device = device
        self.qo_indptr, self.kv_indptr = (
            torch.tensor([0, *counts], dtype=torch.int32, device=device).cumsum(0, dtype=torch.int32)
            for counts in (new, lengths)
        )
        self.q = torch.randn(sum(new), 4, 64, device=device)
        self.k, self.v = torch.randn(2, sum(lengths), 2, 64, device=device)

    def plan(self, wrapper: BatchPrefillWithRaggedKVCacheWrapper, **changes: Any) -> None:
        options = {"causal": True, "q_data_type": "float32", **changes}
        wrapper.plan(self.qo_indptr, self.kv_indptr, 4, 2, 64, **options)

    def check(self, wrapper: BatchPrefillWithRaggedKVCacheWrapper, masking: Masking | None = None) -> None:
        actual = wrapper.run(self.q, self.k, self.v, return_lse=True)
        options, masking = AttentionOptions(64**-0.5), masking or Masking(causal=True)
        assert_close(
            actual,
            prefill_ragged_reference(self.q, self.k, self.v, self.qo_indptr, self.kv_indptr, options, masking),
        )


def ragged_wrapper(
    device: torch.device, *, qo: int = 4, kv: int = 4, **masks: torch.Tensor
) -> tuple[BatchPrefillWithRaggedKVCacheWrapper, Buffers]:
    buffers = int32({"qo_indptr_buf": qo, "kv_indptr_buf": kv}, device)
    return BatchPrefillWithRaggedKVCacheWrapper(workspace(device), "NHD", True, **buffers, **masks), buffers


def addresses(wrapper: BatchPrefillWithRaggedKVCacheWrapper) -> list[int]:
    """Returns the addresses of everything that a captured launch reads and a plan writes."""
    assert wrapper._planned is not None
    kv_indptr, _, queries = wrapper._planned
    work = queries.division.work
    tensors = [kv_indptr, queries.qo_indptr, work.units, work.indptr]
    if queries.masking.custom_mask is not None and queries.masking.mask_indptr is not None:
        tensors += [queries.masking.custom_mask, queries.masking.mask_indptr]
    return [tensor.data_ptr() for tensor in tensors]


def test_a_graph_of_ragged_prefill_sees_a_new_plan_where_the_old_one_was(device: torch.device) -> None:
    wrapper, buffers = ragged_wrapper(device)
    first, second = Ragged([30, 5, 0], [90, 5, 7], device), Ragged([2, 3, 25], [20, 33, 25], device)
    seen = []
    for batch in (first, second, first):
        batch.plan(wrapper)
        batch.check(wrapper)
        seen.append(addresses(wrapper))
        assert buffers["qo_indptr_buf"].tolist() == batch.qo_indptr.tolist()
        assert buffers["kv_indptr_buf"].tolist() == batch.kv_indptr.tolist()
    assert seen[0] == seen[1] == seen[2]
    assert seen[0][:2] == [buffers["kv_indptr_buf"].data_ptr(), buffers["qo_indptr_buf"].data_ptr()]


def test_a_replay_of_ragged_prefill_attends_to_what_was_planned_last(device: torch.device) -> None:
    """Replays the launches of the first plan; on a GPU they are a captured graph."""
    wrapper, _ = ragged_wrapper(device)
    first, second = Ragged([30, 5, 1], [90, 5, 7], device), Ragged([6, 5, 25], [44, 33, 25], device)
    first.plan(wrapper)
    captured = wrapper._planned
    q, k, v, out = first.q.clone(), first.k.clone(), first.v.clone(), torch.zeros_like(first.q)

    def run() -> None:
        wrapper.run(q, k, v, out=out)

    replay = run
    if device.type == "cuda":
        run()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        replay = graph.replay
    second.plan(wrapper)
    # A captured graph keeps its addresses, so the graph sees the second plan only if `plan` wrote to the same memory.
    wrapper._planned = captured
    q.copy_(second.q)
    k.copy_(second.k)
    v.copy_(second.v)
    replay()
    options, masking = AttentionOptions(64**-0.5), Masking(causal=True)
    indptrs = (second.qo_indptr, second.kv_indptr)
    expected, _ = prefill_ragged_reference(second.q, second.k, second.v, *indptrs, options, masking)
    torch.testing.assert_close(out.double(), expected, rtol=TOLERANCE[torch.float32], atol=TOLERANCE[torch.float32])


def test_a_graph_of_ragged_prefill_may_have_masks_of_other_sizes(device: torch.device) -> None:
    masks = {
        "custom_mask_buf": torch.zeros(3000, dtype=torch.bool, device=device),
        "mask_indptr_buf": torch.zeros(4, dtype=torch.int64, device=device),
    }
    wrapper, _ = ragged_wrapper(device, **masks)
    for batch in (Ragged([30, 5, 1], [90, 5, 7], device), Ragged([2, 3, 25], [20, 33, 25], device)):
        sizes = batch.qo_indptr.diff().long() * batch.kv_indptr.diff().long()
        mask = (torch.rand(int(sizes.sum())) < 0.5).to(device)
        batch.plan(wrapper, custom_mask=mask)
        indptr = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
        batch.check(wrapper, Masking(custom_mask=mask, mask_indptr=indptr))
        assert addresses(wrapper)[4:] == [buffer.data_ptr() for buffer in masks.values()]
    large = Ragged([30, 5, 1], [120, 5, 7], device)
    with pytest.raises(
        ValueError, match=r"^custom_mask_buf must be torch.bool with at least 3632 entries, not torch.bool with 3000"
    ):
        large.plan(wrapper, custom_mask=torch.ones(3632, dtype=torch.bool, device=device))


def test_a_graph_of_ragged_prefill_refuses_what_it_has_no_room_for_and_keeps_its_plan(device: torch.device) -> None:
    wrapper, buffers = ragged_wrapper(device)
    batch = Ragged([30, 5, 0], [90, 5, 7], device)
    batch.plan(wrapper)
    kept = {name: buffer.clone() for name, buffer in buffers.items()}
    for message, other, changes in (
        (
            "^qo_indptr must have at most 35 tokens, like the CUDA graph, not 36",
            Ragged([31, 5, 0], [90, 5, 7], device),
            {},
        ),
        ("buf: the plan must have 3 requests, like the CUDA graph, not 2", Ragged([3, 5], [90, 5], device), {}),
        (
            "^qo_indptr_buf must be torch.int32 with at least .* entries, not torch.int32 with 4",
            Ragged([3, 5, 1, 1], [90, 5, 1, 1], device),
            {},
        ),
        ("^use_cuda_graph: plan", Ragged([3, 5, 1], [9, 5, 7], device), {"causal": False}),
        ("^use_cuda_graph: plan", Ragged([3, 5, 1], [9, 5, 7], device), {"window_left": 2}),
    ):
        with pytest.raises(ValueError, match=message):
            other.plan(wrapper, **changes)
    assert all(torch.equal(buffers[name], before) for name, before in kept.items())
    batch.check(wrapper)


@pytest.mark.parametrize(("sizes", "name"), [({"qo": 6}, "qo_indptr_buf"), ({"kv": 6}, "kv_indptr_buf")])
def test_buffers_of_another_batch_are_refused(sizes: dict[str, int], name: str, device: torch.device) -> None:
    wrapper, _ = ragged_wrapper(device, **sizes)
    with pytest.raises(ValueError, match=f"^{name}: the plan must have 5 requests, like the CUDA graph, not 3"):
        Ragged([30, 5, 0], [90, 5, 7], device).plan(wrapper)


def test_a_plan_of_decode_that_is_refused_writes_nothing(device: torch.device) -> None:
    sizes = {"paged_kv_indptr_buffer": 3, "paged_kv_indices_buffer": 4, "paged_kv_last_page_len_buffer": 2}
    buffers = int32(sizes, device)
    wrapper = BatchDecodeWithPagedKVCacheWrapper(workspace(device), use_cuda_graph=True, **buffers)
    scene = Scene([20, 30], device=device)
    wrapper.plan(*scene.table, 4, 2, 64, 16, q_data_type="float32")
    before, kept = wrapper.run(scene.q, scene.cache), [buffer.clone() for buffer in buffers.values()]
    for message, other in (
        (
            "^paged_kv_indices_buffer must be torch.int32 with at least 5 entries, not torch.int32 with 4",
            Scene([20, 40]),
        ),
        ("^paged_kv_indptr_buffer: the plan must have 2 requests, like the CUDA graph, not 1", Scene([40])),
    ):
        with pytest.raises(ValueError, match=message):
            wrapper.plan(*other.table, 4, 2, 64, 16, q_data_type="float32")
    assert all(torch.equal(buffer, was) for buffer, was in zip(buffers.values(), kept, strict=True))
    assert torch.equal(wrapper.run(scene.q, scene.cache), before)


def test_a_plan_of_paged_prefill_that_is_refused_writes_nothing(device: torch.device) -> None:
    names = ("qo_indptr_buf", "paged_kv_indptr_buf", "paged_kv_indices_buf", "paged_kv_last_page_len_buf")
    buffers = int32(dict(zip(names, (3, 3, 20, 2), strict=True)), device)
    wrapper = BatchPrefillWithPagedKVCacheWrapper(workspace(device), use_cuda_graph=True, **buffers)

    def plan(scene: Scene, **changes: Any) -> None:
        options = {"causal": True, "q_data_type": "float32", **changes}
        wrapper.plan(scene.qo_indptr, *scene.table, 4, 2, 64, 16, **options)

    scene = Scene([20, 30], query_lengths=[5, 9], device=device)
    plan(scene)
    before, kept = wrapper.run(scene.q, scene.cache), [buffer.clone() for buffer in buffers.values()]
    for message, other, changes in (
        (
            "^qo_indptr must have at most .* tokens, like the CUDA graph, not 15",
            Scene([40, 20], query_lengths=[6, 9], device=device),
            {},
        ),
        ("^use_cuda_graph: plan", Scene([40, 20], query_lengths=[5, 9], device=device), {"causal": False}),
        (
            "^custom_mask must have",
            Scene([40, 20], query_lengths=[5, 9], device=device),
            {"custom_mask": torch.ones(1) > 0},
        ),
        ("^paged_kv_indices_buf must be", Scene([320, 20], query_lengths=[5, 9], device=device), {}),
    ):
        with pytest.raises(ValueError, match=message):
            plan(other, **changes)
    assert all(torch.equal(buffer, was) for buffer, was in zip(buffers.values(), kept, strict=True))
    assert torch.equal(wrapper.run(scene.q, scene.cache), before)
