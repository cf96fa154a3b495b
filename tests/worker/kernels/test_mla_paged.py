"""Multi-head latent attention, compared with float64."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from quire_kernels.ops import mla_paged as real
from quire_kernels.ops.mla_paged import mla_paged, mla_paged_reference
from quire_kernels.shared.mla_work import divide_mla
from quire_kernels.shared.paged_cache import kv_lengths
from quire_kernels.shared.reference import TOLERANCE
from torch.nn.functional import scaled_dot_product_attention

from .attention_scene import assert_close, spread


def latents_match(
    module: ModuleType,
    device: torch.device,
    lengths: list[int],
    new: list[int] | None = None,
    *,
    heads: int = 4,
    page_size: int = 16,
    ckv_dim: int = 64,
    kpe_dim: int = 16,
    dtype: torch.dtype = torch.float32,
    causal: bool = True,
    arrange: Callable[[torch.Tensor], torch.Tensor] | None = None,
    arrange_queries: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor,
) -> None:
    """Compares the kernel with the reference. The module may be the real or a faulty one.

    Latents and their positional part are in one pool, with NaN in unused slots. `arrange` changes the memory layout of
    each of them, and `arrange_queries` that of the queries.

    Raises:
        AssertionError: the kernel differs from the reference.
    """
    counts = [-(-length // page_size) for length in lengths]
    pool = torch.full((sum(counts) + 2, page_size, ckv_dim + kpe_dim), torch.nan)
    indices = torch.randperm(sum(counts) + 2)[: sum(counts)].int()
    indptr = torch.tensor([0, *counts]).cumsum(0).int()
    for request, length in enumerate(lengths):
        for position in range(length):
            page = indices[indptr[request] + position // page_size]
            pool[page, position % page_size] = torch.randn(ckv_dim + kpe_dim)
    pool = pool.to(dtype).to(device)
    ckv, kpe = pool[..., :ckv_dim], pool[..., ckv_dim:]
    if arrange is not None:
        ckv, kpe = arrange(ckv), arrange(kpe)
    last = torch.tensor([(n - 1) % page_size + 1 if n else 0 for n in lengths], dtype=torch.int32)
    queries = new or [1] * len(lengths)
    q = torch.randn(sum(queries), heads, ckv_dim + kpe_dim).to(dtype).to(device)
    q_nope, q_pe = arrange_queries(q[..., :ckv_dim]), arrange_queries(q[..., ckv_dim:])
    qo_indptr = torch.tensor([0, *queries]).cumsum(0).int().to(device)
    table = tuple(tensor.to(device) for tensor in (indptr, indices, last))
    tokens = kv_lengths(table[0], table[2], page_size)
    division = divide_mla(
        qo_indptr, tokens, token_count=sum(queries), split_keys=new is None, heads=heads, ckv_dim=ckv_dim,
        element_bytes=dtype.itemsize, page_size=page_size,
    )  # fmt: skip
    actual = module.mla_paged(
        q_nope, q_pe, ckv, kpe, qo_indptr, table[0], table[1], tokens, division, sm_scale=0.1, causal=causal
    )
    expected = mla_paged_reference(q_nope, q_pe, (ckv, kpe), qo_indptr, table, sm_scale=0.1, causal=causal)
    assert_close(actual, expected)


def check(device: torch.device, lengths: list[int], new: list[int] | None = None, **shape: Any) -> None:
    latents_match(real, device, lengths, new, **shape)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_decode_gives_the_softmax(page_size: int, dtype: torch.dtype, device: torch.device) -> None:
    check(device, [19, 0, 130], page_size=page_size, dtype=dtype)


@pytest.mark.parametrize("new", [None, [9, 3]], ids=["decode", "prefill"])
def test_latents_of_the_usual_size(new: list[int] | None, device: torch.device) -> None:
    check(device, [70, 3], new, heads=16, page_size=64, ckv_dim=512, kpe_dim=64, dtype=torch.bfloat16)
    check(device, [70, 3], new, heads=4, page_size=64, ckv_dim=512, kpe_dim=64)


@pytest.mark.parametrize("new", [None, [2, 1]], ids=["decode", "prefill"])
@pytest.mark.parametrize("heads", [1, 5, 7, 16, 20, 128])
def test_any_number_of_heads(heads: int, new: list[int] | None, device: torch.device) -> None:
    check(device, [33, 1], new, heads=heads)


@pytest.mark.parametrize("new", [None, [9, 3, 1]], ids=["decode", "prefill"])
def test_latents_and_positions_may_lie_in_pools_of_their_own(new: list[int] | None, device: torch.device) -> None:
    check(device, [33, 0, 5], new, arrange=torch.Tensor.contiguous)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_any_page_size_and_dtype_in_prefill(page_size: int, dtype: torch.dtype, device: torch.device) -> None:
    check(device, [19, 0, 70], [3, 2, 9], heads=2, page_size=page_size, dtype=dtype)


def test_one_long_request_is_split(device: torch.device) -> None:
    check(device, [600, 2, 3, 0], heads=2)


@pytest.mark.parametrize("new", [None, [5, *[1] * 31]], ids=["decode", "prefill"])
def test_one_long_request_beside_thirty_one_short_ones(new: list[int] | None, device: torch.device) -> None:
    check(device, [150, *(length % 9 for length in range(31))], new, heads=1, dtype=torch.bfloat16)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("new", [[9, 0, 33], [1, 4, 2]], ids=str)
def test_prefill_gives_the_softmax(new: list[int], causal: bool, device: torch.device) -> None:
    check(device, [20, 4, 33], new, heads=3, causal=causal)


@pytest.mark.parametrize("new", [None, [2, 3]], ids=["decode", "prefill"])
@pytest.mark.parametrize("dim", [0, 1], ids=["page", "token"])
def test_offsets_past_two_to_the_thirty_first_elements(dim: int, new: list[int] | None, device: torch.device) -> None:
    check(device, [20, 9], new, dtype=torch.float16, arrange=lambda tensor: spread(tensor, dim))


@pytest.mark.parametrize("new", [None, [2, 3]], ids=["decode", "prefill"])
@pytest.mark.parametrize("dim", [0, 1], ids=["token", "head"])
def test_queries_past_two_to_the_thirty_first_elements(dim: int, new: list[int] | None, device: torch.device) -> None:
    check(device, [20, 9], new, dtype=torch.float16, arrange_queries=lambda tensor: spread(tensor, dim))


def test_agrees_with_pytorchs_attention(device: torch.device) -> None:
    ckv, kpe = torch.randn(4, 16, 64, device=device), torch.randn(4, 16, 16, device=device)
    q_nope, q_pe = torch.randn(40, 5, 64, device=device), torch.randn(40, 5, 16, device=device)
    qo_indptr, kv_indptr, pages, lengths = (
        torch.tensor(values, dtype=torch.int32, device=device) for values in ([0, 40], [0, 3], [2, 0, 3], [40])
    )
    division = divide_mla(
        qo_indptr, lengths, token_count=40, split_keys=False, heads=5, ckv_dim=64, element_bytes=4, page_size=16
    )
    indices = (qo_indptr, kv_indptr, pages, lengths)
    out, _ = mla_paged(q_nope, q_pe, ckv, kpe, *indices, division, sm_scale=0.1, causal=True)
    key = torch.cat([ckv, kpe], 2)[pages.long()].flatten(0, 1)[:40].expand(1, 1, 40, 80)
    query = torch.cat([q_nope, q_pe], 2).transpose(0, 1)[None]
    expected = scaled_dot_product_attention(query, key, key[..., :64], is_causal=True, scale=0.1, enable_gqa=True)[
        0
    ].transpose(0, 1)
    torch.testing.assert_close(out, expected, rtol=TOLERANCE[torch.float32], atol=TOLERANCE[torch.float32])


def test_queries_before_the_first_key_give_zeros(device: torch.device) -> None:
    check(device, [5, 0], [9, 2], heads=2)


def test_what_does_not_fit_is_refused_by_name(device: torch.device) -> None:
    q_nope, q_pe = torch.zeros(1, 2, 64, device=device), torch.zeros(1, 2, 16, device=device)
    ckv, kpe = torch.zeros(1, 4, 64, device=device), torch.zeros(1, 4, 16, device=device)
    index = torch.tensor([0, 1], dtype=torch.int32, device=device)
    sizes = {"token_count": 1, "split_keys": True, "heads": 2, "ckv_dim": 64, "element_bytes": 4, "page_size": 4}
    division = divide_mla(index, index[1:], **sizes)

    def refused(message: str, **changes: object) -> None:
        arguments = {
            "q_nope": q_nope, "q_pe": q_pe, "ckv_cache": ckv, "kpe_cache": kpe, "qo_indptr": index,
            "kv_indptr": index, "kv_indices": index, "kv_lengths": index[1:], "division": division, **changes,
        }  # fmt: skip
        with pytest.raises(ValueError, match=message):
            mla_paged(**arguments, sm_scale=1.0, causal=False)  # type: ignore[arg-type]

    refused("^q_pe must be", q_pe=q_pe.half())
    refused("^kpe is", kpe_cache=kpe[:, :2])
    refused("^the last dims of ckv and kpe", ckv_cache=torch.zeros(1, 4, 32, device=device))
    refused("^the last dim of kpe", kpe_cache=torch.zeros(1, 4, 24, device=device))
    refused("^kv_lengths must have", kv_lengths=index)
    refused("^division", division=divide_mla(index, index[1:], **{**sizes, "heads": 4}))
