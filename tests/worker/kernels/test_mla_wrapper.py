"""`BatchMLAPagedAttentionWrapper`, compared with float64: arguments, plans of CUDA graphs, and refusals."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from quire_kernels.flashinfer import BatchMLAPagedAttentionWrapper
from quire_kernels.ops.mla_paged import mla_paged_reference

from .attention_scene import assert_close

HEADS, CKV, KPE, PAGE_SIZE = 6, 64, 16, 8
DTYPES = (torch.float32, torch.float32)


class Scene:
    """Requests with some lengths and new tokens, in scattered pages with NaN in unused slots."""

    def __init__(self, lengths: list[int], new: list[int], device: torch.device) -> None:
        counts = [-(-length // PAGE_SIZE) for length in lengths]
        self.indptr = torch.tensor([0, *counts]).cumsum(0).int()
        self.indices = torch.randperm(sum(counts) + 2)[: sum(counts)].int()
        self.lengths = torch.tensor(lengths, dtype=torch.int32)
        self.last = torch.tensor([(n - 1) % PAGE_SIZE + 1 for n in lengths], dtype=torch.int32)
        self.pool = torch.randn(sum(counts) + 2, PAGE_SIZE, CKV + KPE, device=device)
        for request, last in enumerate(self.last.tolist()):
            self.pool[self.indices[self.indptr[request + 1] - 1], last:] = torch.nan
        self.q = torch.randn(sum(new), HEADS, CKV + KPE, device=device)
        self.qo_indptr = torch.tensor([0, *new]).cumsum(0).int()

    def plan(self, wrapper: BatchMLAPagedAttentionWrapper, **changes: Any) -> None:
        given = {"kv_len_arr": self.lengths, "causal": True, "page_size": PAGE_SIZE, **changes}
        wrapper.plan(
            self.qo_indptr, self.indptr, self.indices, given["kv_len_arr"], HEADS, CKV, KPE, given["page_size"],
            given["causal"], 0.1, *DTYPES,
        )  # fmt: skip

    def run(self, wrapper: BatchMLAPagedAttentionWrapper, **options: Any) -> Any:
        q, pool = self.q, self.pool
        return wrapper.run(q[..., :CKV], q[..., CKV:], pool[..., :CKV], pool[..., CKV:], **options)

    def expected(self) -> tuple[torch.Tensor, torch.Tensor]:
        q, pool, device = self.q, self.pool, self.q.device
        table = (self.indptr.to(device), self.indices.to(device), self.last.to(device))
        caches = pool[..., :CKV], pool[..., CKV:]
        qo_indptr = self.qo_indptr.to(device)
        return mla_paged_reference(q[..., :CKV], q[..., CKV:], caches, qo_indptr, table, sm_scale=0.1, causal=True)


@pytest.mark.parametrize("new", [[1, 1, 1], [3, 1, 9]], ids=str)
def test_the_wrapper_gives_the_softmax(new: list[int], device: torch.device) -> None:
    scene = Scene([19, 5, 9], new, device)
    wrapper = BatchMLAPagedAttentionWrapper(torch.empty(64, dtype=torch.uint8, device=device))
    scene.plan(wrapper)
    assert_close(scene.run(wrapper, return_lse=True), scene.expected())
    q, ckv, kpe = scene.q, scene.pool[..., :CKV], scene.pool[..., CKV:]
    with pytest.raises(ValueError, match=r"^q_pe must be"):
        wrapper.run(q[..., :CKV], q[..., :CKV], ckv, kpe)
    with pytest.raises(ValueError, match=r"^kv_indices must be in 0..0"):
        wrapper.run(q[..., :CKV], q[..., CKV:], ckv[:1], kpe[:1])


def test_lengths_that_do_not_fit_the_pages_are_refused_by_name(device: torch.device) -> None:
    scene = Scene([19, 5, 0], [1, 1, 1], device)  # The requests have three pages, one page and no page.
    wrapper = BatchMLAPagedAttentionWrapper(torch.empty(64, dtype=torch.uint8, device=device))
    scene.plan(wrapper)
    for message, lengths in (
        ("kv_len_arr of request 0 must be in 17..24, not 25", [25, 5, 0]),
        ("kv_len_arr of request 0 must be in 17..24, not 16", [16, 5, 0]),
        ("kv_len_arr of request 1 must be in 1..8, not 9", [19, 9, 0]),
        ("kv_len_arr of request 1 must be in 1..8, not -3", [24, -3, 0]),
        ("kv_len_arr of request 2 must be in 0..0, not 1", [17, 8, 1]),
        ("kv_len_arr of request 2 must be in 0..0, not -1", [17, 1, -1]),
    ):
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            scene.plan(wrapper, kv_len_arr=torch.tensor(lengths, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"^kv_len_arr must be int32"):
        scene.plan(wrapper, kv_len_arr=torch.tensor([19, 5, 0]))


def graph_wrapper(
    batch: int, device: torch.device, *, indptr_length: int | None = None
) -> tuple[BatchMLAPagedAttentionWrapper, list[torch.Tensor]]:
    """Returns a wrapper for CUDA graphs, and its buffers."""
    length = indptr_length or batch + 1
    names = ("qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr")
    buffers = [torch.zeros(n, dtype=torch.int32, device=device) for n in (length, length, 32, batch)]
    workspace = torch.empty(64, dtype=torch.uint8, device=device)
    given = dict(zip(names, buffers, strict=True))
    return BatchMLAPagedAttentionWrapper(workspace, use_cuda_graph=True, **given), buffers


@pytest.mark.parametrize("new", [[[1, 1], [1, 1]], [[9, 5], [2, 11]]], ids=["decode", "prefill"])
def test_a_graph_sees_a_new_plan_where_the_old_one_was(new: list[list[int]], device: torch.device) -> None:
    scenes = [Scene([90, 5], new[0], device), Scene([20, 33], new[1], device)]
    wrapper, buffers = graph_wrapper(2, device)
    for scene in (*scenes, scenes[0]):
        scene.plan(wrapper)
        assert_close(scene.run(wrapper, return_lse=True), scene.expected())
        assert buffers[0].tolist() == scene.qo_indptr.tolist()


@pytest.mark.parametrize("new", [[1, 1, 1], [9, 5, 4]], ids=["decode", "prefill"])
def test_a_graph_refuses_another_batch_and_keeps_its_plan(new: list[int], device: torch.device) -> None:
    scene = Scene([19, 5, 9], new, device)
    wrapper, buffers = graph_wrapper(3, device)
    scene.plan(wrapper)
    kept = [buffer.clone() for buffer in buffers]
    for message, other, changes in (
        ("^kv_len_arr must have 3 requests, like the CUDA graph, not 2", Scene([19, 5], new[:2], device), {}),
        ("^use_cuda_graph: plan", scene, {"causal": False}),
        (
            "^use_cuda_graph: plan|^qo_indptr must have at most .* tokens, like the CUDA graph, not 30",
            Scene([19, 5, 40], [9, 5, 16], device),
            {},
        ),
    ):
        with pytest.raises(ValueError, match=message):
            other.plan(wrapper, **changes)
    assert all(torch.equal(buffer, before) for buffer, before in zip(buffers, kept, strict=True))
    assert_close(scene.run(wrapper, return_lse=True), scene.expected())


def test_a_graph_of_prefill_refuses_more_tokens_than_the_first_plan_had(device: torch.device) -> None:
    wrapper, _ = graph_wrapper(3, device)
    Scene([19, 5, 9], [9, 5, 4], device).plan(wrapper)
    with pytest.raises(ValueError, match=r"^qo_indptr must have at most 18 tokens, like the CUDA graph, not 30"):
        Scene([19, 5, 40], [9, 5, 16], device).plan(wrapper)


def test_buffers_of_another_batch_are_refused(device: torch.device) -> None:
    with pytest.raises(ValueError, match=r"^qo_indptr must have 4"):
        graph_wrapper(3, device, indptr_length=5)
    wrapper, _ = graph_wrapper(3, device)
    with pytest.raises(ValueError, match=r"^kv_len_arr must have 3 requests, like the CUDA graph, not 2"):
        Scene([19, 5], [9, 5], device).plan(wrapper)
