"""Prefill over pages, compared with float64 and with PyTorch's attention, and its edge cases."""

from __future__ import annotations

import pytest
import torch
from quire_kernels.ops.pack_mask import segment_packbits
from quire_kernels.ops.prefill_attention import prefill_paged, prefill_paged_reference
from quire_kernels.shared.fp8 import E4M3, E5M2
from quire_kernels.shared.paged_cache import kv_lengths
from quire_kernels.shared.prefill_rows import Masking, divide_prefill, mask_indptr_of, prefill_tiling
from quire_kernels.shared.reference import TOLERANCE
from torch.nn.functional import scaled_dot_product_attention

from .attention_scene import LAYOUTS, Scene, assert_close, spread

ROUNDING = TOLERANCE[torch.float32]
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def mask_of(scene: Scene, *, packed: bool, share: float = 0.5) -> Masking:
    """Returns a random custom mask."""
    lengths = kv_lengths(scene.indptr, scene.last_page_len, scene.page_size)
    indptr = mask_indptr_of(scene.qo_indptr, lengths, packed=False)
    mask = (torch.rand(int(indptr[-1])) < share).to(scene.device)
    if not packed:
        return Masking(custom_mask=mask, mask_indptr=indptr)
    bits, _ = segment_packbits(mask, indptr, "little")
    return Masking(custom_mask=bits, mask_indptr=mask_indptr_of(scene.qo_indptr, lengths, packed=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("ratio", [1, 5, 7, 8, 16])
def test_any_ratio_of_heads_gives_the_softmax(ratio: int, dtype: torch.dtype, device: torch.device) -> None:
    scene = Scene([19, 4], heads=ratio, kv_heads=1, dtype=dtype, query_lengths=[3, 4], device=device)
    scene.check_prefill()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("head_dim", [64, 72, 80, 96, 128, 256])
def test_any_head_dim_gives_the_softmax(head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
    Scene([21, 5], head_dim=head_dim, dtype=dtype, query_lengths=[9, 2], device=device).check_prefill()


@pytest.mark.parametrize(("head_dim", "v_head_dim"), [(192, 128), (64, 96)])
def test_keys_and_values_may_differ_in_head_dim(head_dim: int, v_head_dim: int, device: torch.device) -> None:
    scene = Scene(
        [21, 5], head_dim=head_dim, v_head_dim=v_head_dim, layout="HND pair", query_lengths=[9, 2], device=device
    )
    scene.check_prefill()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_any_page_size_in_any_layout_gives_the_softmax(page_size: int, layout: str, device: torch.device) -> None:
    scene = Scene([1, 67, 16], page_size=page_size, layout=layout, query_lengths=[1, 9, 16], device=device)
    scene.check_prefill()


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("length", "new"), [(1, 1), (33, 33), (64, 64), (65, 1), (100, 40), (97, 33), (16, 5), (128, 31)]
)
def test_chunks_of_prompts_are_right_aligned(length: int, new: int, causal: bool, device: torch.device) -> None:
    Scene([length], query_lengths=[new], device=device).check_prefill(Masking(causal=causal))


@pytest.mark.parametrize("causal", [True, False])
def test_requests_without_queries_or_keys_do_no_harm(causal: bool, device: torch.device) -> None:
    scene = Scene([9, 0, 30, 0], query_lengths=[0, 3, 5, 0], device=device)
    scene.check_prefill(Masking(causal=causal))
    out, lse = scene.prefill(scene.options(), Masking(causal=causal))
    assert out[:3].eq(0).all()
    assert lse[:3].eq(-torch.inf).all()


@pytest.mark.parametrize("causal", [True, False])
def test_of_a_request_without_pages_the_length_of_the_last_does_not_matter(causal: bool, device: torch.device) -> None:
    scene = Scene([0, 30, 0], query_lengths=[2, 9, 3], page_size=4, last_of_none=9, device=device)
    scene.check_prefill(Masking(causal=causal))


def test_queries_before_the_first_key_give_zeros(device: torch.device) -> None:
    scene = Scene([5], query_lengths=[9], device=device)
    scene.check_prefill()
    out, lse = scene.prefill(scene.options(), Masking(causal=True))
    assert out[:4].eq(0).all()
    assert lse[:4].eq(-torch.inf).all()
    assert lse[4:].isfinite().all()


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window_left", [0, 1, 15, 40, 200])
def test_a_window_is_inclusive(window_left: int, causal: bool, device: torch.device) -> None:
    scene = Scene([120, 17], page_size=8, query_lengths=[50, 17], device=device)
    scene.check_prefill(Masking(causal=causal), window_left=window_left)


def test_pages_that_left_the_window_of_all_queries_are_not_read(device: torch.device) -> None:
    scene = Scene([120], page_size=8, query_lengths=[20], device=device)
    options = scene.options(window_left=10)
    expected = prefill_paged_reference(
        scene.q, scene.unpacked, scene.qo_indptr, *scene.table, options, Masking(causal=True)
    )
    freed = (120 - 20 - 10) // 8
    scene.cache[scene.indices[:freed].long()] = torch.nan
    scene.indices[:freed] = -(2**30)
    assert_close(scene.prefill(options, Masking(causal=True)), expected)


@pytest.mark.parametrize("chunk_size", [1, 16, 24, 100])
def test_a_query_sees_only_its_own_chunk(chunk_size: int, device: torch.device) -> None:
    scene = Scene([90, 24], page_size=8, query_lengths=[60, 24], device=device)
    scene.check_prefill(Masking(causal=True, chunk_size=chunk_size))


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("share", [0.0, 0.05, 0.5, 1.0])
def test_a_custom_mask_says_who_sees_whom(share: float, packed: bool, device: torch.device) -> None:
    scene = Scene([37, 11, 0, 5], query_lengths=[13, 3, 2, 5], device=device)
    scene.check_prefill(mask_of(scene, packed=packed, share=share))


@pytest.mark.parametrize("packed", [True, False])
def test_a_custom_mask_and_a_window_both_hide(packed: bool, device: torch.device) -> None:
    scene = Scene([37, 11], query_lengths=[13, 3], device=device)
    scene.check_prefill(mask_of(scene, packed=packed), window_left=6)


def test_a_row_that_its_mask_hides_from_all_keys_gives_zeros(device: torch.device) -> None:
    scene = Scene([20], query_lengths=[4], device=device)
    masking = mask_of(scene, packed=False)
    assert masking.custom_mask is not None
    masking.custom_mask[20:40] = False
    out, lse = scene.prefill(scene.options(), masking)
    assert out[1].eq(0).all()
    assert lse[1].eq(-torch.inf).all()
    scene.check_prefill(masking)


def test_a_tree_of_drafts_is_verified_at_once(device: torch.device) -> None:
    parents = [-1, 0, 0, 1, 1, 2]  # Each draft token's parent. All draft tokens see the 40 tokens before them.
    tree = torch.zeros(6, 46, dtype=torch.bool)
    tree[:, :40] = True
    for token, parent in enumerate(parents):
        if parent >= 0:
            tree[token] = tree[parent]
        tree[token, 40 + token] = True
    scene = Scene([46], query_lengths=[6], device=device)
    indptr = torch.tensor([0, tree.numel()], device=device)
    scene.check_prefill(Masking(custom_mask=tree.flatten().to(device), mask_indptr=indptr))


@pytest.mark.parametrize("soft_cap", [0.5, 50.0])
def test_a_soft_cap_bounds_the_scores(soft_cap: float, device: torch.device) -> None:
    Scene([30, 9], query_lengths=[12, 9], device=device).check_prefill(logits_soft_cap=soft_cap)


def test_sinks_take_part_of_the_weight(device: torch.device) -> None:
    scene = Scene([30, 0, 90], query_lengths=[12, 2, 40], device=device)
    scene.check_prefill(sinks=scene.numbers(4) * 2)


def test_slopes_add_a_bias_by_distance(device: torch.device) -> None:
    scene = Scene([90, 7], query_lengths=[30, 7], device=device)
    scene.check_prefill(alibi_slopes=scene.numbers(4).abs() / 4)


@pytest.mark.parametrize("fp8", [E4M3, E5M2], ids=str)
def test_all_options_together(fp8: torch.dtype, device: torch.device) -> None:
    scene = Scene([90, 0, 33], query_lengths=[30, 0, 33], dtype=torch.bfloat16, cache_dtype=fp8, device=device)
    scene.check_prefill(
        window_left=40, logits_soft_cap=3.0, sinks=scene.numbers(4), alibi_slopes=scene.numbers(4).abs() / 10,
        k_scale=scene.numbers(2).abs() + 0.5, v_scale=scene.numbers(2).abs() + 0.5,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("fp8", [E4M3, E5M2], ids=str)
def test_an_fp8_cache_is_scaled_by_head(fp8: torch.dtype, dtype: torch.dtype, device: torch.device) -> None:
    scene = Scene([45, 3], query_lengths=[9, 3], dtype=dtype, cache_dtype=fp8, device=device)
    scene.check_prefill(k_scale=scene.numbers(2).abs() + 0.5, v_scale=scene.numbers(2).abs() + 0.5)


def test_one_long_request_beside_thirty_one_short_ones(device: torch.device) -> None:
    lengths = [300, *(1 + length % 9 for length in range(31))]
    Scene(lengths, query_lengths=[20, *[1] * 31], heads=1, kv_heads=1, device=device).check_prefill()


def test_prefill_of_one_query_is_decode(device: torch.device) -> None:
    scene = Scene([45, 0, 3, 200], device=device)
    decoded = scene.decode(scene.options(window_left=30))
    prefilled = scene.prefill(scene.options(window_left=30), Masking(causal=True))
    torch.testing.assert_close(prefilled, decoded, rtol=ROUNDING, atol=ROUNDING)


def test_a_chunked_prompt_gives_what_the_whole_prompt_gives(device: torch.device) -> None:
    scene = Scene([60], query_lengths=[60], device=device)
    whole, _ = scene.prefill(scene.options(), Masking(causal=True))
    q = scene.q
    for start, stop in ((0, 7), (7, 40), (40, 60)):
        pages = -(-stop // 16)
        scene.q, scene.qo_indptr = q[start:stop], scene.index([0, stop - start])
        part = Scene([stop], query_lengths=[stop - start], device=device)
        part.cache, part.q = scene.cache, scene.q
        part.indices, part.page_count = scene.indices[:pages], scene.page_count
        chunk, _ = part.prefill(part.options(), Masking(causal=True))
        torch.testing.assert_close(chunk, whole[start:stop], rtol=ROUNDING, atol=ROUNDING)


def test_offsets_past_two_to_the_thirty_first_elements(device: torch.device) -> None:
    pages = torch.empty(70_000, 2, 16, 8, 128, dtype=torch.float16, device=device)
    scene = Scene([20], heads=8, kv_heads=8, head_dim=128, dtype=torch.float16, query_lengths=[2], device=device)
    far = torch.tensor([69_999, 69_995], dtype=torch.int32, device=device)
    pages[far.long()] = scene.cache[scene.indices.long()]
    scene.cache, scene.indices = pages, far
    scene.check_prefill()


@pytest.mark.parametrize("axis", ["page", "token", "head", "dim"])
def test_strides_past_two_to_the_thirty_first_elements(axis: str, device: torch.device) -> None:
    scene = Scene([20, 9], query_lengths=[3, 2], dtype=torch.float16, layout="NHD pair", device=device)
    scene.cache = tuple(spread(part, ("page", "token", "head", "dim").index(axis)) for part in scene.cache)
    scene.check_prefill()


@pytest.mark.parametrize("dim", [0, 1, 2], ids=["token", "head", "dim"])
def test_queries_past_two_to_the_thirty_first_elements(dim: int, device: torch.device) -> None:
    scene = Scene([20, 9], query_lengths=[3, 2], dtype=torch.float16, device=device)
    scene.q = spread(scene.q, dim)
    scene.check_prefill()


def test_agrees_with_pytorchs_attention(device: torch.device) -> None:
    scene = Scene([64, 64], query_lengths=[64, 64], device=device)
    out, _ = scene.prefill(scene.options(), Masking(causal=True))
    k, v = (part[scene.indices.long()].view(2, 64, 2, 64).transpose(1, 2) for part in scene.cache.unbind(1))
    q = scene.q.view(2, 64, 4, 64).transpose(1, 2)
    expected = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2).flatten(0, 1)
    torch.testing.assert_close(out, expected, rtol=ROUNDING, atol=ROUNDING)


@pytest.mark.parametrize("seed", range(10))
def test_random_batches(seed: int, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(seed)

    def pick(*choices: int) -> int:
        return choices[int(torch.randint(len(choices), (), generator=generator))]

    lengths = [pick(0, 1, 5, 33, 70) for _ in range(pick(1, 2, 4))]
    kv_heads = pick(1, 2)
    scene = Scene(
        lengths,
        page_size=pick(1, 4, 16, 64),
        kv_heads=kv_heads,
        heads=kv_heads * pick(1, 3),
        head_dim=pick(32, 64, 80),
        layout=LAYOUTS[pick(0, 1, 2, 3)],
        query_lengths=[min(length + pick(0, 0, 2), pick(1, 8, 40)) for length in lengths],
        device=device,
    )
    sinks = scene.numbers(scene.heads) if pick(0, 1) else None
    masking = Masking(causal=bool(pick(0, 1)), chunk_size=pick(0, 0, 13))
    scene.check_prefill(masking, window_left=pick(-1, -1, 7), sinks=sinks)


def test_what_does_not_fit_is_refused_by_name(device: torch.device) -> None:
    scene = Scene([5, 3], query_lengths=[2, 1], device=device)
    tiling = prefill_tiling("sm_90", 4, 64, 64, 4)
    division = divide_prefill(scene.qo_indptr, token_count=3, group=2, tiling=tiling)

    def refused(message: str, **changes: object) -> None:
        arguments = {
            "q": scene.q, "cache": scene.unpacked, "qo_indptr": scene.qo_indptr, "indptr": scene.indptr,
            "indices": scene.indices, "last_page_len": scene.last_page_len, "options": scene.options(),
            "masking": Masking(), "division": division, **changes,
        }  # fmt: skip
        with pytest.raises(ValueError, match=message):
            prefill_paged(**arguments)  # type: ignore[arg-type]

    refused("^q must be", q=scene.q[..., :32])
    refused("^the cache must have the dtype of q", q=scene.q.half())
    refused("^qo_indptr must have", qo_indptr=scene.qo_indptr[:2])
    refused("^indptr must be int32", indptr=scene.indptr.long())
    refused("^last_page_len must have", last_page_len=scene.last_page_len[:1])
    refused("^division", division=divide_prefill(scene.qo_indptr, token_count=2, group=2, tiling=tiling))
    refused("^division", division=divide_prefill(scene.qo_indptr, token_count=3, group=1, tiling=tiling))
    mask = torch.ones(13, dtype=torch.bool, device=device)
    starts = torch.zeros(2, dtype=torch.long, device=device)
    refused("^mask_indptr must have", masking=Masking(custom_mask=mask, mask_indptr=starts))
    for message, arguments in (
        ("^custom_mask replaces", {"custom_mask": mask, "causal": True}),
        ("^custom_mask must be a flat", {"custom_mask": mask.int()}),
        ("^mask_indptr", {"custom_mask": mask}),
        ("^chunk_size", {"chunk_size": -1}),
    ):
        with pytest.raises(ValueError, match=message):
            Masking(**arguments)


@pytest.mark.parametrize("name", ["qo_indptr", "indptr", "indices", "last_page_len"])
def test_an_index_tensor_on_another_device_is_refused_by_name(name: str, device: torch.device) -> None:
    scene = Scene([9], query_lengths=[3], device=device)
    options, masking = scene.options(), Masking(causal=True)
    scene.prefill(options, masking)
    tiling = prefill_tiling("sm_90", 6, 64, 64, 4)
    division = divide_prefill(scene.qo_indptr, token_count=3, group=2, tiling=tiling)
    tensors = dict(zip(("indptr", "indices", "last_page_len"), scene.table, strict=True)) | {
        "qo_indptr": scene.qo_indptr
    }
    tensors[name] = tensors[name].to("meta")
    with pytest.raises(ValueError, match=f"^{name} must be on the queries' device"):
        prefill_paged(scene.q, scene.unpacked, options=options, masking=masking, division=division, **tensors)
