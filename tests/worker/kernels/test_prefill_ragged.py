"""Prefill of ragged keys, compared with float64 and with prefill over pages."""

from __future__ import annotations

import pytest
import torch
from quire_kernels.ops.pack_mask import segment_packbits
from quire_kernels.ops.prefill_attention import prefill_ragged, prefill_ragged_reference
from quire_kernels.shared.fp8 import E4M3, E5M2
from quire_kernels.shared.options import AttentionOptions
from quire_kernels.shared.prefill_rows import Masking, divide_prefill, mask_indptr_of, prefill_tiling
from quire_kernels.shared.reference import TOLERANCE
from torch.nn.functional import scaled_dot_product_attention

from .attention_scene import assert_close, spread

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def ragged(
    device: torch.device,
    q_lengths: list[int],
    kv_lengths: list[int],
    *,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 64,
    v_head_dim: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensors:
    """Returns q, k, v, qo_indptr and kv_indptr. The rows around k and v hold NaN."""
    total = sum(kv_lengths)
    q = torch.randn(sum(q_lengths), heads, head_dim).to(dtype).to(device)
    padded = []
    for dim in (head_dim, v_head_dim or head_dim):
        tensor = torch.full((total + 80, kv_heads, dim), torch.nan)
        tensor[40 : 40 + total] = torch.randn(total, kv_heads, dim)
        padded.append(tensor.to(dtype).to(device)[40 : 40 + total])
    indptrs = [torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32) for lengths in (q_lengths, kv_lengths)]
    return q, padded[0], padded[1], indptrs[0], indptrs[1]


def check(tensors: Tensors, masking: Masking, options: AttentionOptions | None = None) -> None:
    q, k, v, qo_indptr, _ = tensors
    options = options or AttentionOptions(q.shape[2] ** -0.5)
    group = q.shape[1] // k.shape[1]
    tiling = prefill_tiling("sm_90", q.shape[0] * group // (len(qo_indptr) - 1), k.shape[2], v.shape[2], 4)
    division = divide_prefill(qo_indptr, token_count=q.shape[0], group=group, tiling=tiling)
    actual = prefill_ragged(*tensors, options, masking, division)
    assert_close(actual, prefill_ragged_reference(*tensors, options, masking))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_ragged_batches_give_the_softmax(dtype: torch.dtype, causal: bool, device: torch.device) -> None:
    check(ragged(device, [9, 0, 33, 2], [9, 4, 70, 0], dtype=dtype), Masking(causal=causal))


@pytest.mark.parametrize(
    ("head_dim", "v_head_dim"), [(192, 128), (64, 64), (80, 80), (96, 96), (128, 128), (256, 256), (128, 64)]
)
def test_any_head_dims_give_the_softmax(head_dim: int, v_head_dim: int, device: torch.device) -> None:
    check(ragged(device, [9, 3], [20, 3], head_dim=head_dim, v_head_dim=v_head_dim), Masking(causal=True))


@pytest.mark.parametrize("ratio", [1, 5, 7, 8, 16])
def test_any_ratio_of_heads_gives_the_softmax(ratio: int, device: torch.device) -> None:
    check(ragged(device, [5, 3], [20, 3], heads=2 * ratio), Masking(causal=True))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("ratio", [5, 7, 16])
def test_any_ratio_of_heads_in_half_precision(ratio: int, dtype: torch.dtype, device: torch.device) -> None:
    check(ragged(device, [5, 3], [20, 3], heads=ratio, kv_heads=1, dtype=dtype), Masking(causal=True))


@pytest.mark.parametrize("head_dim", [72, 80, 96, 256])
def test_any_head_dim_in_half_precision(head_dim: int, device: torch.device) -> None:
    check(ragged(device, [9, 3], [20, 3], head_dim=head_dim, dtype=torch.bfloat16), Masking(causal=True))


def test_queries_before_the_first_key_give_zeros(device: torch.device) -> None:
    check(ragged(device, [9, 2, 3], [5, 0, 3]), Masking(causal=True))
    check(ragged(device, [2, 1], [0, 0]), Masking(causal=False))


def test_one_long_request_beside_thirty_one_short_ones(device: torch.device) -> None:
    lengths = [300, *(1 + length % 9 for length in range(31))]
    check(ragged(device, [20, *[1] * 31], lengths, heads=1, kv_heads=1), Masking(causal=True))


@pytest.mark.parametrize("dim", [0, 1, 2], ids=["token", "head", "dim"])
def test_offsets_past_two_to_the_thirty_first_elements(dim: int, device: torch.device) -> None:
    q, k, v, qo_indptr, kv_indptr = ragged(device, [3, 2], [9, 11], dtype=torch.float16)
    check((q, spread(k, dim), spread(v, dim), qo_indptr, kv_indptr), Masking(causal=True))
    check((spread(q, dim), k, v, qo_indptr, kv_indptr), Masking(causal=True))


@pytest.mark.parametrize("causal", [True, False])
def test_agrees_with_pytorchs_attention(causal: bool, device: torch.device) -> None:
    q, k, v, _, kv_indptr = tensors = ragged(device, [33, 17], [33, 17])
    division = divide_prefill(kv_indptr, token_count=50, group=2, tiling=prefill_tiling("sm_90", 50, 64, 64, 4))
    out, _ = prefill_ragged(*tensors, AttentionOptions(0.125), Masking(causal=causal), division)
    for start, stop in ((0, 33), (33, 50)):
        parts = (part[start:stop].transpose(0, 1).unsqueeze(0) for part in (q, k, v))
        expected = scaled_dot_product_attention(*parts, is_causal=causal, enable_gqa=True)[0].transpose(0, 1)
        torch.testing.assert_close(
            out[start:stop], expected, rtol=TOLERANCE[torch.float32], atol=TOLERANCE[torch.float32]
        )


@pytest.mark.parametrize("window_left", [0, 7, 50])
def test_a_window_is_inclusive(window_left: int, device: torch.device) -> None:
    options = AttentionOptions(0.125, window_left=window_left)
    check(ragged(device, [40, 3], [80, 3]), Masking(causal=True), options)


@pytest.mark.parametrize("chunk_size", [5, 32])
def test_a_query_sees_only_its_own_chunk(chunk_size: int, device: torch.device) -> None:
    check(ragged(device, [40, 3], [80, 3]), Masking(causal=True, chunk_size=chunk_size))


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("share", [0.0, 0.05, 0.4, 1.0])
def test_a_custom_mask_says_who_sees_whom(share: float, packed: bool, device: torch.device) -> None:
    tensors = ragged(device, [7, 3, 2], [21, 5, 0])
    indptr = mask_indptr_of(tensors[3], tensors[4].diff(), packed=False)
    mask = (torch.rand(int(indptr[-1])) < share).to(device)
    if packed:
        mask, indptr = (
            segment_packbits(mask, indptr, "little")[0],
            mask_indptr_of(tensors[3], tensors[4].diff(), packed=True),
        )
    check(tensors, Masking(custom_mask=mask, mask_indptr=indptr))


def test_a_row_that_its_mask_hides_from_all_keys_gives_zeros(device: torch.device) -> None:
    tensors = ragged(device, [4], [20])
    mask = torch.ones(80, dtype=torch.bool, device=device)
    mask[20:40] = False
    masking = Masking(custom_mask=mask, mask_indptr=torch.tensor([0, 80], device=device))
    check(tensors, masking)
    tiling = prefill_tiling("sm_90", 8, 64, 64, 4)
    division = divide_prefill(tensors[3], token_count=4, group=2, tiling=tiling)
    out, lse = prefill_ragged(*tensors, AttentionOptions(0.125), masking, division)
    assert out[1].eq(0).all()
    assert lse[1].eq(-torch.inf).all()


@pytest.mark.parametrize("fp8", [E4M3, E5M2], ids=str)
def test_options_and_fp8(fp8: torch.dtype, device: torch.device) -> None:
    q, k, v, qo_indptr, kv_indptr = ragged(device, [7, 3], [21, 5], dtype=torch.bfloat16)
    options = AttentionOptions(
        0.2,
        logits_soft_cap=4.0,
        sinks=torch.randn(4, device=device),
        alibi_slopes=torch.rand(4, device=device) / 4,
        k_scale=torch.tensor([0.5, 2.0], device=device),
        v_scale=torch.tensor([3.0, 0.25], device=device),
    )
    k, v = k.float().to(fp8), v.float().to(fp8)
    check((q, k, v, qo_indptr, kv_indptr), Masking(causal=True), options)


def test_keys_and_values_may_have_any_strides(device: torch.device) -> None:
    q, k, v, qo_indptr, kv_indptr = ragged(device, [7, 3], [21, 5])
    k = k.transpose(0, 1).contiguous().transpose(0, 1)
    v = v.repeat_interleave(2, 2)[..., ::2]
    check((q, k, v, qo_indptr, kv_indptr), Masking(causal=True))


def test_what_does_not_fit_is_refused_by_name(device: torch.device) -> None:
    q, k, v, qo_indptr, kv_indptr = ragged(device, [2, 1], [5, 3])
    division = divide_prefill(qo_indptr, token_count=3, group=2, tiling=prefill_tiling("sm_90", 4, 64, 64, 4))

    def refused(message: str, **changes: torch.Tensor) -> None:
        arguments = {"q": q, "k": k, "v": v, "qo_indptr": qo_indptr, "kv_indptr": kv_indptr, **changes}
        with pytest.raises(ValueError, match=message):
            prefill_ragged(**arguments, options=AttentionOptions(1.0), masking=Masking(), division=division)

    refused("^q must be", q=q[..., :32])
    refused("^k and v must be", v=v[:3])
    refused("^v must have the dtype of k", v=v.half())
    refused("^the cache must have the dtype of q", k=k.half(), v=v.half())
    refused("^kv_indptr must have", kv_indptr=kv_indptr[:2])
    refused("^qo_indptr must be int32", qo_indptr=qo_indptr.long())
