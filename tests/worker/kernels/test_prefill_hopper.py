"""Prefill on Hopper: its arithmetic on a CPU, when it is chosen, and on a Hopper chip its results."""

from __future__ import annotations

import random
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from quire_kernels.ops.prefill_hopper import CAPABILITY, fits_hopper
from quire_kernels.shared import reference
from quire_kernels.shared.options import AttentionOptions
from quire_kernels.shared.paged_cache import unpack_paged_cache
from quire_kernels.shared.prefill_rows import Masking
from quire_kernels.shared.tma_pages import page_rows

from tests.worker.kernels.hopper_model import Request, Sizes, attend, unit_of_piece

sys.path.append(str(Path(__file__).resolve().parents[3] / "benchmarks"))

from kernel_sides.hopper_checks import SHAPES, Batch, Shape, check

HAS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == CAPABILITY
on_hopper = pytest.mark.skipif(not HAS_HOPPER, reason="needs a GPU of compute capability 9")
CPU = torch.device("cpu")


@pytest.mark.parametrize("seed", range(60))
def test_pieces_tiles_boxes_and_masks_give_the_softmax(seed: int) -> None:
    draw = random.Random(seed)
    page_size, block_n, block_m = draw.choice([2, 4, 8, 16, 32]), draw.choice([8, 16]), draw.choice([4, 8, 12])
    group, kv_heads, dim = draw.choice([1, 3, 4, 5, 7, 8]), draw.choice([1, 2]), 4
    causal, window_left = draw.random() < 0.7, draw.choice([-1, -1, 0, 3, 20])
    lengths = [(draw.randint(0, 12), draw.choice([0, draw.randint(1, 70)])) for _ in range(draw.randint(1, 4))]
    pages = [-(-kv // page_size) for _, kv in lengths]
    ids = iter(draw.sample(range(sum(pages) + 2), sum(pages)))
    k, v = torch.full((2, sum(pages) + 2, page_size, kv_heads, dim), torch.nan).double()
    requests, dense = [], []
    for (q_len, kv_len), count in zip(lengths, pages, strict=True):
        own = [next(ids) for _ in range(count)]
        visible_low = max(0, kv_len - q_len - window_left) if window_left >= 0 else 0
        keys = torch.randn(2, kv_len, kv_heads, dim).double()
        for position in range(visible_low, kv_len):  # Keys that no query sees stay NaN.
            k[own[position // page_size], position % page_size] = keys[0, position]
            v[own[position // page_size], position % page_size] = keys[1, position]
        unseen = visible_low // page_size
        page_ids = [10**9] * unseen + own[unseen:]  # the ids of unseen pages are invalid, because nothing may read them
        requests.append(Request(torch.randn(q_len, group * kv_heads, dim).double(), page_ids, kv_len))
        dense.append(keys)
    results = attend(requests, k, v, Sizes(group, block_m, block_n, causal, window_left))
    for request, keys, (out, lse) in zip(requests, dense, results, strict=True):
        seen = reference.visible(request.q.shape[0], request.kv_len, causal=causal, window_left=window_left)
        options = AttentionOptions(sm_scale=dim**-0.5)
        expected = reference.attend(request.q, keys[0], keys[1], seen, options)
        torch.testing.assert_close(out, expected[0], rtol=1e-9, atol=1e-9, msg=f"seed {seed}")
        torch.testing.assert_close(lse, expected[1], rtol=1e-6, atol=1e-6, msg=f"seed {seed}")


@pytest.mark.parametrize(("batch", "length"), [(16, 1024), (4, 4096), (1, 8192), (3, 3000)])
def test_programs_that_take_pieces_in_order_get_equal_shares(batch: int, length: int) -> None:
    tiles = [token // 128 + 1 for _ in range(batch) for token in range(31, length, 32)]  # one unit per 32 tokens
    shares = [0] * 132
    for number in range(len(tiles) * 8):
        shares[shares.index(min(shares))] += tiles[unit_of_piece(number, len(tiles), 8)]
    assert max(shares) < 1.02 * 8 * sum(tiles) / 132


def test_pages_are_rows_of_a_matrix_in_either_layout() -> None:
    nhd, hnd = torch.zeros(9, 2, 16, 8, 128), torch.zeros(9, 2, 8, 16, 128)
    for cache in (unpack_paged_cache(nhd.half()), unpack_paged_cache(hnd.half(), "HND")):
        for part, name in ((cache.k, "k"), (cache.v, "v")):
            part.copy_(torch.randn_like(part))
            rows = page_rows(part)
            assert rows is not None, name
            matrix = part.as_strided((rows.count, rows.width), (part.stride(1), 1))
            for page, token, head in ((0, 0, 0), (8, 15, 7), (5, 3, 2)):
                row = page * rows.per_page + head * rows.per_head + token
                column = head * rows.columns_per_head
                assert torch.equal(matrix[row, column : column + 128], part[page, token, head])


def test_strides_that_tma_cannot_address_are_refused() -> None:
    assert page_rows(torch.zeros(4, 16, 2, 64).half()) is not None
    assert page_rows(torch.zeros(4, 16, 2, 128).half()[..., ::2]) is None  # elements of a head are not adjacent
    assert page_rows(torch.zeros(4, 16, 2, 68).half()[..., :64]) is None  # a stride of 136 bytes between heads
    assert page_rows(torch.zeros(4 * 16 * 2 * 64 + 1).half()[1:].view(4, 16, 2, 64)) is None  # an unaligned address
    # These strides between pages give 2^30 and 2^31 rows.
    for stride, is_right in ((2**36, True), (2**37, False)):
        far = torch.empty_strided((2, 16, 1, 64), (stride, 64, 64, 1), dtype=torch.float16, device="meta")
        assert (page_rows(far) is not None) == is_right


def batch_of(**changes: object) -> Batch:
    return Batch(replace(SHAPES[0], lengths=((40, 70), (90, 90)), **changes), CPU)  # type: ignore[arg-type]


def fits(batch: Batch, **changes: object) -> bool:
    given = {"q": batch.q, "cache": batch.cache, "options": batch.options, "masking": batch.masking}
    return fits_hopper(**(given | {"division": batch.division} | changes))  # type: ignore[arg-type]


def test_what_the_kernel_is_not_made_for_takes_the_other() -> None:
    batch = batch_of()
    assert fits(batch)
    assert all(fits(batch_of(page_size=size)) for size in (8, 16, 32, 64, 128, 256))
    assert not any(fits(batch_of(page_size=size)) for size in (1, 4, 48))
    assert not any(fits(batch_of(head_dim=dim)) for dim in (32, 80, 96))
    assert not fits(batch_of(dtype=torch.float32))
    vectors = {"alibi_slopes": 32, "k_scale": 8, "v_scale": 8}
    for name, length in vectors.items():
        assert not fits(batch, options=replace(batch.options, **{name: torch.ones(length)}))
    assert not fits(batch, options=replace(batch.options, sm_scale=-1.0))
    assert not fits(batch, masking=Masking(causal=True, chunk_size=64))
    assert not fits(batch, masking=Masking(custom_mask=torch.ones(9).bool(), mask_indptr=torch.zeros(3).long()))
    assert not fits(batch, q=batch.q.transpose(0, 2).contiguous().transpose(0, 2))
    # With so few rows per request, blocks have 16 rows, which the Hopper kernel does not support.
    few = Batch(replace(SHAPES[0], lengths=((3, 70), (5, 90))), CPU)
    assert not fits(few)


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.title)
def test_every_shape_gives_the_softmax(shape: Shape, device: torch.device) -> None:
    row = check(shape, device)
    assert row["passed"], row
    assert row["kernel"] == ("triton" if shape.head_dim == 256 else "hopper")


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[5], replace(SHAPES[0], lengths=((20, 30), (90, 90)))])
def test_a_plan_is_run_again(shape: Shape, device: torch.device) -> None:
    batch = Batch(shape, device)
    first, second = batch.run(), batch.run()
    assert batch.division.taken.item() == 0
    for before, after in zip(first, second, strict=True):
        torch.testing.assert_close(after, before, rtol=0, atol=0)


@pytest.mark.gpu
@on_hopper
def test_a_graph_is_replayed_with_other_queries_keys_and_pages(device: torch.device) -> None:
    batch, other = Batch(SHAPES[0], device), Batch(SHAPES[0], device)
    batch.run()  # This first run compiles the kernel.
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = batch.run()
    batch.q.copy_(torch.randn_like(other.q))
    order = torch.randperm(batch.cache.page_count, device=device)
    for part, source in ((batch.cache.k, other.cache.k), (batch.cache.v, other.cache.v)):
        part[order] = source.clone()
    batch.table[1].copy_(order[other.table[1].long()])
    graph.replay()
    expected = batch.expected()
    torch.testing.assert_close(out.double(), expected[0], rtol=3e-2, atol=3e-2)
    torch.testing.assert_close(lse.double(), expected[1], rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
@on_hopper
def test_pages_past_2_to_the_31_elements_are_read(device: torch.device) -> None:
    batch = Batch(SHAPES[0], device)
    page_count, cache = batch.cache.page_count, batch.cache
    far = 2**31 // cache.k.stride(0)
    pool = torch.full((far + page_count, 2, 16, 8, 128), torch.nan, dtype=batch.q.dtype, device=device)
    expected = batch.run()
    pool[far:, 0].copy_(cache.k)
    pool[far:, 1].copy_(cache.v)
    batch.cache = unpack_paged_cache(pool)
    batch.table[1].add_(far)
    out, lse = batch.run()
    torch.testing.assert_close(out, expected[0], rtol=0, atol=0)
    torch.testing.assert_close(lse, expected[1], rtol=0, atol=0)
