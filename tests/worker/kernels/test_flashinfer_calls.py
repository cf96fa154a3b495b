"""FlashInfer's own examples with another import line and smaller shapes, compared with attention in float64."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import quire_kernels as flashinfer
import torch
from quire_kernels.shared.options import AttentionOptions
from quire_kernels.shared.reference import attend, visible

from .attention_scene import assert_close

LAYERS, HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE, PAGES = 2, 4, 2, 64, 4, 12
SCALE = AttentionOptions(HEAD_DIM**-0.5)
KV_PAGE_INDPTR, KV_LAST_PAGE_LEN = [0, 5, 8, 12], [1, 3, 4]  # three requests with 17, 11 and 16 tokens
QO_INDPTR = [0, 9, 11, 18]


@pytest.fixture
def workspace(device: torch.device) -> torch.Tensor:
    return torch.zeros(1 << 20, dtype=torch.uint8, device=device)


def int32(values: list[int], device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def half(*shape: int, device: torch.device) -> torch.Tensor:
    return torch.randn(*shape).half().to(device)


def paged_cache(layout: str, device: torch.device) -> torch.Tensor:
    """Returns a cache `[layers, pages, 2, ...]`."""
    slots = (PAGE_SIZE, KV_HEADS) if layout == "NHD" else (KV_HEADS, PAGE_SIZE)
    return half(LAYERS, PAGES, 2, *slots, HEAD_DIM, device=device)


def keys_and_values(cache: torch.Tensor, layout: str, pages: range, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns keys and values of a request's pages, each `[length, kv_heads, head_dim]`."""
    nhd = cache if layout == "NHD" else cache.transpose(2, 3)
    k, v = nhd[pages.start : pages.stop].unbind(1)
    return k.flatten(0, 1)[:length], v.flatten(0, 1)[:length]


def requests(cache: torch.Tensor, layout: str) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for (start, stop), last in zip(itertools.pairwise(KV_PAGE_INDPTR), KV_LAST_PAGE_LEN, strict=True):
        yield keys_and_values(cache, layout, range(start, stop), (stop - start - 1) * PAGE_SIZE + last)


def expected(
    q: torch.Tensor, qo_indptr: list[int], parts: Iterator[tuple[torch.Tensor, torch.Tensor]], *, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    outs, lses = [], []
    for (start, stop), (k, v) in zip(itertools.pairwise(qo_indptr), parts, strict=True):
        seen = visible(stop - start, len(k), causal=causal).to(q.device)
        out, lse = attend(q[start:stop], k, v, seen, SCALE)
        outs.append(out)
        lses.append(lse)
    return torch.cat(outs), torch.cat(lses)


def causal_mask(qo_lengths: list[int], kv_lengths: list[int], device: torch.device) -> torch.Tensor:
    mask_arr = []
    for qo_len, kv_len in zip(qo_lengths, kv_lengths, strict=True):
        mask_i = torch.tril(torch.full((qo_len, kv_len), True, device=device), diagonal=(kv_len - qo_len))
        mask_arr.append(mask_i.flatten())
    return torch.cat(mask_arr, dim=0)


def test_get_batch_indices_positions(device: torch.device) -> None:
    append_indptr = int32([0, 1, 3, 6, 10], device)
    batch_indices, positions = flashinfer.get_batch_indices_positions(append_indptr, torch.tensor([5, 5, 5, 5]), 10)
    assert batch_indices.tolist() == [0, 1, 1, 2, 2, 2, 3, 3, 3, 3]
    assert positions.tolist() == [4, 3, 4, 2, 3, 4, 1, 2, 3, 4]
    assert batch_indices.dtype == positions.dtype == torch.int32


def test_append_paged_kv_cache(device: torch.device) -> None:
    nnz_kv = 20
    k_append, v_append = (half(nnz_kv, KV_HEADS, HEAD_DIM, device=device) for _ in range(2))
    # The lengths of the four requests add up to nnz_kv: 9 + 2 + 5 + 4 = 20.
    kv_append_length = int32([9, 2, 5, 4], device)
    kv_append_indptr = torch.cat([torch.zeros(1).int().to(device), torch.cumsum(kv_append_length, dim=0)]).int()
    num_pages_per_req = int32([3, 1, 2, 1], device)
    kv_page_indptr = torch.cat([torch.zeros(1).int().to(device), torch.cumsum(num_pages_per_req, dim=0)]).int()
    kv_page_indices = torch.arange(7, dtype=torch.int32, device=device)
    kv_last_page_len = int32([1, 2, 1, 4], device)
    before = half(PAGES, 2, PAGE_SIZE, KV_HEADS, HEAD_DIM, device=device)
    paged_kv_cache = before.clone()
    batch_indices, positions = flashinfer.get_batch_indices_positions(
        kv_append_indptr, flashinfer.get_seq_lens(kv_page_indptr, kv_last_page_len, PAGE_SIZE), nnz_kv
    )
    assert positions.tolist() == [*range(9), *range(2), *range(5), *range(4)]
    flashinfer.append_paged_kv_cache(
        k_append, v_append, batch_indices, positions, paged_kv_cache, kv_page_indices, kv_page_indptr, kv_last_page_len
    )
    slots = [*range(9), 12, 13, *range(16, 21), *range(24, 28)]
    for part, appended in enumerate((k_append, v_append)):
        wanted = before[:, part].flatten(0, 1).clone()
        wanted[slots] = appended
        assert torch.equal(paged_kv_cache[:, part].flatten(0, 1), wanted)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_batch_decode(layout: str, workspace: torch.Tensor, device: torch.device) -> None:
    decode_wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, layout)
    decode_wrapper.plan(
        int32(KV_PAGE_INDPTR, device),
        torch.arange(PAGES).int().to(device),
        int32(KV_LAST_PAGE_LEN, device),
        HEADS,
        KV_HEADS,
        HEAD_DIM,
        PAGE_SIZE,
        pos_encoding_mode="NONE",
        data_type=torch.float16,
    )
    for kv_cache in paged_cache(layout, device):
        q = half(3, HEADS, HEAD_DIM, device=device)
        wanted = expected(q, [0, 1, 2, 3], requests(kv_cache, layout), causal=False)
        assert_close(decode_wrapper.run_return_lse(q, kv_cache), wanted)
        assert torch.equal(decode_wrapper.run(q, kv_cache), decode_wrapper.run_return_lse(q, kv_cache)[0])


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_batch_prefill_with_paged_kv_cache(layout: str, workspace: torch.Tensor, device: torch.device) -> None:
    prefill_wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, layout)
    table = (
        int32(QO_INDPTR, device),
        int32(KV_PAGE_INDPTR, device),
        torch.arange(PAGES).int().to(device),
        int32(KV_LAST_PAGE_LEN, device),
    )
    q_at_layer = half(LAYERS, QO_INDPTR[-1], HEADS, HEAD_DIM, device=device)
    kv_cache_at_layer = paged_cache(layout, device)
    mask = causal_mask([9, 2, 7], [17, 11, 16], device)
    for masks in ({"causal": True}, {"custom_mask": mask}):
        prefill_wrapper.plan(*table, HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE, **masks)
        for q, kv_cache in zip(q_at_layer, kv_cache_at_layer, strict=True):
            wanted = expected(q, QO_INDPTR, requests(kv_cache, layout), causal=True)
            assert_close(prefill_wrapper.run(q, kv_cache, return_lse=True), wanted)


def test_batch_prefill_with_ragged_kv_cache(workspace: torch.Tensor, device: torch.device) -> None:
    prefill_wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD")
    qo_indptr = int32(QO_INDPTR, device)
    kv_indptr = qo_indptr.clone()
    q_at_layer = half(LAYERS, QO_INDPTR[-1], HEADS, HEAD_DIM, device=device)
    k_at_layer, v_at_layer = (half(LAYERS, QO_INDPTR[-1], KV_HEADS, HEAD_DIM, device=device) for _ in range(2))
    mask = causal_mask([9, 2, 7], [9, 2, 7], device)
    for masks in ({"causal": True}, {"custom_mask": mask}):
        prefill_wrapper.plan(qo_indptr, kv_indptr, HEADS, KV_HEADS, HEAD_DIM, **masks)
        for q, k, v in zip(q_at_layer, k_at_layer, v_at_layer, strict=True):
            parts = ((k[start:stop], v[start:stop]) for start, stop in itertools.pairwise(QO_INDPTR))
            assert_close(prefill_wrapper.run(q, k, v, return_lse=True), expected(q, QO_INDPTR, parts, causal=True))


def test_batch_mla(device: torch.device) -> None:
    num_local_heads, batch_size, head_dim_ckv, head_dim_kpe, page_size, length = 4, 3, 64, 16, 1, 33
    mla_wrapper = flashinfer.BatchMLAPagedAttentionWrapper(
        torch.empty(1 << 20, dtype=torch.int8).to(device), backend="fa2"
    )
    q_indptr = torch.arange(0, batch_size + 1).to(device).int()  # decode: each request has one query
    kv_lens = torch.full((batch_size,), length, dtype=torch.int32).to(device)
    kv_indptr = torch.arange(0, batch_size + 1).to(device).int() * length
    kv_indices = torch.arange(0, batch_size * length).to(device).int()
    q_nope = half(batch_size, num_local_heads, head_dim_ckv, device=device)
    q_pe = half(batch_size, num_local_heads, head_dim_kpe, device=device)
    ckv = half(batch_size * length, 1, head_dim_ckv, device=device)
    kpe = half(batch_size * length, 1, head_dim_kpe, device=device)
    sm_scale = 1.0 / ((128 + 64) ** 0.5)
    mla_wrapper.plan(
        q_indptr,
        kv_indptr,
        kv_indices,
        kv_lens,
        num_local_heads,
        head_dim_ckv,
        head_dim_kpe,
        page_size,
        False,  # causal
        sm_scale,
        q_nope.dtype,
        ckv.dtype,
    )
    o = mla_wrapper.run(q_nope, q_pe, ckv, kpe, return_lse=False)
    # FlashInfer's newer examples pass the same tensors as `query` and `kv_cache`.
    structural = mla_wrapper.run(query=(q_nope, q_pe), kv_cache=torch.cat([ckv, kpe], -1), return_lse=True)
    assert torch.equal(o, structural[0])
    outs, lses = [], []
    for request in range(batch_size):
        part = slice(request * length, (request + 1) * length)
        query = torch.cat([q_nope, q_pe], -1)[request : request + 1]
        keys = torch.cat([ckv, kpe], -1)[part]  # all query heads share one KV head
        out, lse = attend(query, keys, ckv[part], visible(1, length).to(device), AttentionOptions(sm_scale))
        outs.append(out)
        lses.append(lse)
    assert_close(structural, (torch.cat(outs), torch.cat(lses)))


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_multi_level_cascade(layout: str, workspace: torch.Tensor, device: torch.device) -> None:
    wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(2, workspace, layout)
    batch_size, shared_kv_num_pages = 3, 4
    shared_kv_page_indices = torch.arange(shared_kv_num_pages).int().to(device)
    unique_kv_page_indices = torch.arange(shared_kv_num_pages, PAGES).int().to(device)
    qo_indptr_arr = [
        int32([0, batch_size], device),  # top-level for shared KV-Cache
        torch.arange(batch_size + 1, dtype=torch.int32, device=device),  # bottom-level for unique KV-Cache
    ]
    wrapper.plan(
        qo_indptr_arr,
        [int32([0, shared_kv_num_pages], device), int32([0, 3, 4, 8], device)],
        [shared_kv_page_indices, unique_kv_page_indices],
        [int32([PAGE_SIZE], device), int32(KV_LAST_PAGE_LEN, device)],
        HEADS,
        KV_HEADS,
        HEAD_DIM,
        PAGE_SIZE,
    )
    for kv_cache in paged_cache(layout, device):
        q = half(batch_size, HEADS, HEAD_DIM, device=device)
        shared = keys_and_values(kv_cache, layout, range(4), 16)
        own = [(range(4, 7), 9), (range(7, 8), 3), (range(8, 12), 16)]
        parts = (
            tuple(torch.cat(pair) for pair in zip(shared, keys_and_values(kv_cache, layout, *one), strict=True))
            for one in own
        )
        wanted = expected(q, [0, 1, 2, 3], parts, causal=False)
        assert_close((wrapper.run(q, kv_cache), wrapper.run(q, kv_cache, return_lse=True)[1]), wanted)
