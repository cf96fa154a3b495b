"""Decode, compared with float64 and with PyTorch's attention, and its edge cases."""

from __future__ import annotations

import pytest
import torch
from quire_kernels.ops.decode_paged import decode_paged, decode_paged_reference
from quire_kernels.shared.decode_work import divide_decode
from quire_kernels.shared.fp8 import E4M3, E5M2
from quire_kernels.shared.paged_cache import PagedCache
from quire_kernels.shared.reference import TOLERANCE
from torch.nn.functional import scaled_dot_product_attention

from .attention_scene import LAYOUTS, Scene, assert_close, spread

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("ratio", [1, 5, 7, 8, 16])
def test_any_ratio_of_heads_gives_the_softmax(ratio: int, dtype: torch.dtype, device: torch.device) -> None:
    Scene([19, 0, 1], heads=2 * ratio, kv_heads=2, dtype=dtype, device=device).check_decode()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("head_dim", [16, 64, 72, 80, 96, 128, 256])
def test_any_head_dim_gives_the_softmax(head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
    Scene([21, 5], heads=3, kv_heads=1, head_dim=head_dim, dtype=dtype, device=device).check_decode()


@pytest.mark.parametrize(("head_dim", "v_head_dim"), [(192, 128), (64, 96), (80, 64)])
def test_keys_and_values_may_differ_in_head_dim(head_dim: int, v_head_dim: int, device: torch.device) -> None:
    scene = Scene([21, 5], head_dim=head_dim, v_head_dim=v_head_dim, layout="NHD pair", device=device)
    scene.check_decode()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_any_page_size_in_any_layout_gives_the_softmax(page_size: int, layout: str, device: torch.device) -> None:
    Scene([1, 67, 16, 0], page_size=page_size, layout=layout, device=device).check_decode()


@pytest.mark.parametrize("page_size", [3, 24, 48])
def test_a_page_size_that_is_no_power_of_two_gives_the_softmax(page_size: int, device: torch.device) -> None:
    Scene([1, 67, 16], page_size=page_size, device=device).check_decode()


@pytest.mark.parametrize("length", [1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 200])
def test_lengths_around_pages_tiles_and_units(length: int, device: torch.device) -> None:
    Scene([length], heads=2, kv_heads=1, device=device).check_decode()


@pytest.mark.parametrize("window_left", [0, 1, 15, 16, 31, 40, 300])
def test_a_window_is_inclusive(window_left: int, device: torch.device) -> None:
    Scene([150, 1, 17, 0, 40], page_size=8, device=device).check_decode(window_left=window_left)


def test_pages_that_left_the_window_are_not_read_and_neither_are_their_ids(device: torch.device) -> None:
    scene = Scene([150, 61], page_size=8, device=device)
    options = scene.options(window_left=20)
    expected = decode_paged_reference(scene.q, scene.unpacked, *scene.table, options)
    for request, length in enumerate(scene.lengths):
        first = int(scene.indptr[request])
        freed = (length - 1 - 20) // scene.page_size
        scene.cache[scene.indices[first : first + freed].long()] = torch.nan
        # In the page with the first visible key, slots before this key become NaN.
        slot = (length - 1 - 20) % scene.page_size
        scene.cache[int(scene.indices[first + freed]), :, :slot] = torch.nan
        scene.indices[first : first + freed] = -(2**30)
    assert_close(scene.decode(options), expected)


@pytest.mark.parametrize("soft_cap", [0.5, 5.0, 50.0])
def test_a_soft_cap_bounds_the_scores(soft_cap: float, device: torch.device) -> None:
    scene = Scene([30, 9], device=device)
    scene.q *= 10
    scene.check_decode(logits_soft_cap=soft_cap)


@pytest.mark.parametrize("lengths", [[1], [0], [40, 0, 3], [700]], ids=str)
def test_a_sink_counts_once_however_many_units_there_are(lengths: list[int], device: torch.device) -> None:
    scene = Scene(lengths, device=device)
    scene.check_decode(sinks=scene.numbers(4) * 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("ratio", [1, 3, 7, 20])
def test_units_of_any_ratio_of_heads_are_merged(ratio: int, dtype: torch.dtype, device: torch.device) -> None:
    Scene([0, 530, 3], heads=2 * ratio, kv_heads=2, dtype=dtype, device=device).check_decode()


def test_a_request_without_keys_gives_zeros_and_minus_infinity(device: torch.device) -> None:
    out, lse = (scene := Scene([0, 5, 0], device=device)).decode(scene.options())
    assert out[[0, 2]].eq(0).all()
    assert lse[[0, 2]].eq(-torch.inf).all()
    assert lse[1].isfinite().all()


def test_of_a_request_without_pages_the_length_of_the_last_does_not_matter(device: torch.device) -> None:
    Scene([0, 5, 0], last_of_none=16, device=device).check_decode()


def test_a_batch_of_empty_requests_alone_gives_zeros(device: torch.device) -> None:
    Scene([0, 0], device=device).check_decode()


def test_slopes_add_a_bias_by_distance(device: torch.device) -> None:
    scene = Scene([130, 7], device=device)
    scene.check_decode(alibi_slopes=scene.numbers(4).abs())


def test_all_options_together(device: torch.device) -> None:
    scene = Scene([300, 0, 33], device=device)
    scene.check_decode(
        window_left=140, logits_soft_cap=3.0, sinks=scene.numbers(4), alibi_slopes=scene.numbers(4).abs() / 10,
        k_scale=scene.numbers(2).abs() + 0.5, v_scale=scene.numbers(2).abs() + 0.5,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("fp8", "layout"), [(E4M3, "NHD"), (E4M3, "HND pair"), (E5M2, "NHD"), (E5M2, "HND pair")])
def test_an_fp8_cache_is_scaled_by_head(
    fp8: torch.dtype, layout: str, dtype: torch.dtype, device: torch.device
) -> None:
    scene = Scene([45, 0, 3], dtype=dtype, cache_dtype=fp8, layout=layout, device=device)
    scene.check_decode(k_scale=scene.numbers(2).abs() + 0.5, v_scale=scene.numbers(2).abs() + 0.5)


def test_one_long_request_beside_thirty_one_short_ones(device: torch.device) -> None:
    scene = Scene([900, *range(1, 32)], heads=1, kv_heads=1, device=device)
    scene.check_decode()


@pytest.mark.parametrize("scale", [-0.3, 0.0, 4.0])
def test_any_scale_is_taken(scale: float, device: torch.device) -> None:
    Scene([30, 2], device=device).check_decode(sm_scale=scale)


def test_large_scores_do_not_overflow(device: torch.device) -> None:
    scene = Scene([200, 20], device=device)
    scene.q *= 300
    out, lse = scene.decode(scene.options())
    expected_out, expected_lse = decode_paged_reference(scene.q, scene.unpacked, *scene.table, scene.options())
    # Scores are in the thousands, so the rounding of scores dominates the errors of weights and lse.
    torch.testing.assert_close(out.double(), expected_out, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-5, atol=1e-2)


def test_queries_may_have_any_strides(device: torch.device) -> None:
    scene = Scene([30, 2, 0], device=device)
    scene.q = torch.randn(4, 3, 128, device=device)[..., ::2].transpose(0, 1)
    scene.check_decode()


def test_the_order_of_pages_does_not_matter(device: torch.device) -> None:
    scene = Scene([100, 50], device=device)
    before = scene.decode(scene.options())
    order = torch.randperm(scene.page_count)
    scene.cache = scene.cache[order.to(device)]
    scene.indices = order.argsort().to(device)[scene.indices.long()].int()
    torch.testing.assert_close(scene.decode(scene.options()), before, rtol=0, atol=0)


def test_offsets_past_two_to_the_thirty_first_elements(device: torch.device) -> None:
    page_count, page_size, kv_heads, head_dim = 70_000, 16, 8, 128
    pages = torch.empty(page_count, 2, page_size, kv_heads, head_dim, dtype=torch.float16, device=device)
    assert pages.numel() > 2**31
    scene = Scene([20], heads=8, kv_heads=8, head_dim=128, dtype=torch.float16, device=device)
    far = torch.tensor([page_count - 1, page_count - 5], dtype=torch.int32, device=device)
    pages[far.long()] = scene.cache[scene.indices.long()]
    scene.cache, scene.indices = pages, far
    scene.check_decode()


@pytest.mark.parametrize("axis", ["page", "token", "head", "dim"])
def test_strides_past_two_to_the_thirty_first_elements(axis: str, device: torch.device) -> None:
    scene = Scene([20, 9], dtype=torch.float16, layout="NHD pair", device=device)
    scene.cache = tuple(spread(part, ("page", "token", "head", "dim").index(axis)) for part in scene.cache)
    scene.check_decode()


@pytest.mark.parametrize("dim", [0, 1, 2], ids=["token", "head", "dim"])
def test_queries_past_two_to_the_thirty_first_elements(dim: int, device: torch.device) -> None:
    scene = Scene([20, 9], dtype=torch.float16, device=device)
    scene.q = spread(scene.q, dim)
    scene.check_decode()


def test_agrees_with_pytorchs_attention(device: torch.device) -> None:
    scene = Scene([64, 64], heads=8, kv_heads=2, device=device)
    out, _ = scene.decode(scene.options())
    k, v = (part[scene.indices.long()].view(2, 64, 2, 64).transpose(1, 2) for part in scene.cache.unbind(1))
    expected = scaled_dot_product_attention(scene.q.unsqueeze(2), k, v, enable_gqa=True).squeeze(2)
    torch.testing.assert_close(out, expected, rtol=TOLERANCE[torch.float32], atol=TOLERANCE[torch.float32])


@pytest.mark.parametrize("seed", range(12))
def test_random_batches(seed: int, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(seed)

    def pick(*choices: int) -> int:
        return choices[int(torch.randint(len(choices), (), generator=generator))]

    kv_heads = pick(1, 2, 3)
    scene = Scene(
        [pick(0, 1, 5, 33, 100, 260) for _ in range(pick(1, 2, 5))],
        page_size=pick(1, 4, 16, 32, 64),
        kv_heads=kv_heads,
        heads=kv_heads * pick(1, 2, 3, 6),
        head_dim=pick(32, 64, 80, 96),
        layout=LAYOUTS[pick(0, 1, 2, 3)],
        device=device,
    )
    sinks = scene.numbers(scene.heads) if pick(0, 1) else None
    scene.check_decode(window_left=pick(-1, -1, 7, 64), logits_soft_cap=float(pick(0, 0, 4)), sinks=sinks)


def test_a_new_division_writes_where_the_old_one_was(device: torch.device) -> None:
    scene = Scene([300, 5, 0], device=device)
    sizes = {"page_size": 16, "query_heads": 4, "kv_heads": 2, "head_dim": 64, "v_head_dim": 64, "element_bytes": 4}
    division = divide_decode(scene.indptr, scene.last_page_len, **sizes)
    address = division.work.units.data_ptr()
    other = Scene([3, 0, 280], device=device)
    again = divide_decode(other.indptr, other.last_page_len, **sizes, out=division)
    assert again is division
    assert again.work.units.data_ptr() == address
    options = other.options()
    actual = decode_paged(other.q, other.unpacked, *other.table, options, division)
    assert_close(actual, decode_paged_reference(other.q, other.unpacked, *other.table, options))


def test_what_does_not_fit_is_refused_by_name(device: torch.device) -> None:
    scene = Scene([5, 3], device=device)
    options, cache = scene.options(), scene.unpacked
    sizes = {"page_size": 16, "query_heads": 4, "kv_heads": 2, "head_dim": 64, "v_head_dim": 64, "element_bytes": 4}
    division = divide_decode(scene.indptr, scene.last_page_len, **sizes)

    def refused(message: str, **changes: object) -> None:
        arguments = {
            "q": scene.q, "cache": cache, "indptr": scene.indptr, "indices": scene.indices,
            "last_page_len": scene.last_page_len, "options": options, "division": division, **changes,
        }  # fmt: skip
        with pytest.raises(ValueError, match=message):
            decode_paged(**arguments)  # type: ignore[arg-type]

    refused("^q must be", q=scene.q[..., :32])
    refused("^q must be float16", q=scene.q.double())
    refused("^the cache must have the dtype of q", q=scene.q.half())
    refused("^the number of query heads must be", q=scene.q[:, :3])
    refused("^indptr must have", indptr=scene.indptr[:2])
    refused("^indptr must be int32", indptr=scene.indptr.long())
    refused("^indices must be", indices=scene.indices.long())
    refused("^last_page_len must have", last_page_len=scene.last_page_len[:1])
    refused("^window_left", options=scene.options(window_left=3))
    refused("^sinks must have", options=scene.options(sinks=scene.numbers(3)))
    refused("^k_scale must have", options=scene.options(k_scale=scene.numbers(4)))
    refused("^division", division=divide_decode(scene.indptr, scene.last_page_len, **{**sizes, "query_heads": 8}))
    refused("^out must be", out=scene.q.half())
    refused("^lse must be", lse=scene.numbers(4))
    refused("^out must be contiguous", out=torch.empty(4, 2, 64, device=device).transpose(0, 1))
    refused("^the cache must have the dtype of q", cache=PagedCache(cache.k.half(), cache.v.half()))
