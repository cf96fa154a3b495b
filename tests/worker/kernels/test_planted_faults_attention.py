"""Faults planted in the attention kernels: the comparisons with the reference must notice every one."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from quire_kernels.ops import merge_splits, prefill_attention
from quire_kernels.shared import work_units
from quire_kernels.shared.fp8 import E5M2
from quire_kernels.shared.options import AttentionOptions
from quire_kernels.shared.paged_cache import kv_lengths
from quire_kernels.shared.prefill_rows import Masking, divide_prefill, mask_indptr_of, prefill_tiling
from triton.runtime.jit import JITFunction

from tests.worker.kernels.planting import MODULES, Fault, plant

from .attention_scene import Scene, assert_close

Check = Callable[[torch.device], None]

# With pages of 8 tokens, a float32 tile has two pages. In half precision, pages of 16 tokens give two pages per tile.
SMALL_PAGES = {"page_size": 8}


def decodes(lengths: list[int], shape: dict[str, Any] | None = None, **options: object) -> Check:
    def check(device: torch.device) -> None:
        scene = Scene(lengths, device=device, **(SMALL_PAGES | (shape or {})))
        given = {name: scene.numbers(count) for name, count in options.items() if name in VECTORS}
        scene.check_decode(**{**options, **given})

    return check


def prefills(lengths: list[int], new: list[int], masking: Masking | None = None, **options: object) -> Check:
    def check(device: torch.device) -> None:
        Scene(lengths, query_lengths=new, device=device, **SMALL_PAGES).check_prefill(masking, **options)

    return check


def decodes_without_pages(device: torch.device) -> None:
    Scene([0, 30], device=device, last_of_none=16).check_decode()


def prefills_without_pages(device: torch.device) -> None:
    scene = Scene([0, 30], query_lengths=[2, 9], device=device, page_size=4, last_of_none=9)
    scene.check_prefill(Masking(causal=False))


def prefills_under_bits(device: torch.device) -> None:
    scene = Scene([37, 11], query_lengths=[13, 3], device=device)
    lengths = kv_lengths(scene.indptr, scene.last_page_len, scene.page_size)
    indptr = mask_indptr_of(scene.qo_indptr, lengths, packed=True)
    bits = torch.randint(0, 256, (int(indptr[-1]),)).to(device, torch.uint8)
    scene.check_prefill(Masking(custom_mask=bits, mask_indptr=indptr))


def prefills_ragged(device: torch.device) -> None:
    q = torch.randn(5, 4, 64, device=device)
    k, v = torch.randn(2, 20, 2, 64, device=device)
    indptrs = [torch.tensor(entries, dtype=torch.int32, device=device) for entries in ([0, 3, 5], [0, 9, 20])]
    tiling = prefill_tiling("sm_90", 5, 64, 64, 4)
    division = divide_prefill(indptrs[0], token_count=5, group=2, tiling=tiling)
    options, masking = AttentionOptions(0.125), Masking(causal=True)
    expected = prefill_attention.prefill_ragged_reference(q, k, v, *indptrs, options, masking)
    assert_close(prefill_attention.prefill_ragged(q, k, v, *indptrs, options, masking, division), expected)


def divides(device: torch.device) -> None:
    first, last = (torch.tensor(x, dtype=torch.int32, device=device) for x in ([0, 0, 64, 0], [640, 0, 100, 31]))
    how = {"unit_target": 7, "size_min": 32, "alignment": 32, "units_min": 1}
    work = work_units.divide_work(first, last, **how)
    rows, indptr = work_units.divide_work_reference(first, last, **how)
    assert work.indptr.tolist() == indptr
    assert [tuple(row) for row in work.units[: len(rows)].tolist()] == rows


def merges(device: torch.device) -> None:
    indptr = [0, 40, 41, 44]
    out, lse = torch.randn(44, 2, 64, device=device), torch.randn(44, 2, device=device)
    lse[32:40] += 20  # The second block of units outweighs the first block.
    merged, merged_lse = torch.zeros(3, 2, 64, device=device), torch.zeros(3, 2, device=device)
    units = torch.zeros(44, 4, dtype=torch.int32, device=device)
    work = work_units.WorkUnits(units, torch.tensor(indptr, dtype=torch.int32, device=device))
    merge_splits.merge_splits(out, lse, work, merged, merged_lse)
    expected = merge_splits.merge_splits_reference(out, lse, indptr)
    assert_close((merged[[0, 2]], merged_lse[[0, 2]]), (expected[0][[0, 2]], expected[1][[0, 2]]))


VECTORS = ("sinks", "alibi_slopes", "k_scale", "v_scale")
ONE_PAGE = {"page_size": 64}  # A tile is within one page, so the kernel reads unused slots unless it masks them.
FAULTS: list[tuple[Fault, Check]] = [
    (Fault(title, module, before, after), check)
    for module, title, before, after, check in (
        ("tile", "the soft cap is forgotten", "soft_capped(s * scoring.scale, scoring.soft_cap) * LOG2_E",
         "s * scoring.scale * LOG2_E",
         decodes([30], logits_soft_cap=0.5)),
        ("tile", "scores are taken in base 2", "s = s * (scoring.scale * LOG2_E)", "s = s * scoring.scale",
         decodes([30])),
        ("tile", "the soft cap comes before the scale", "soft_capped(s * scoring.scale, scoring.soft_cap)",
         "soft_capped(s, scoring.soft_cap) * scoring.scale", decodes([30], logits_soft_cap=0.5)),
        ("tile", "values of unused slots are read", "load_tile(keys.v, offsets, key_valid,",
         "load_tile(keys.v, offsets, key >= 0,", decodes([40], ONE_PAGE)),
        ("tile", "e5m2 is read as e4m3", "x = e5m2_to_float(x)", "x = e4m3_to_float(x)",
         decodes([30], {"cache_dtype": E5M2})),
        ("fp8", "e5m2 loses its lowest bit", "(byte.to(tl.int32) & 0xFF) << 8", "(byte.to(tl.int32) & 0xFE) << 8",
         decodes([30], {"cache_dtype": E5M2})),
        ("tile", "the lse is natural", "row_max + tl.log2(", "row_max + tl.log(", decodes([30])),
        ("tile", "every unit counts the sink", "        if is_first:", "        if is_first | True:",
         decodes([700], sinks=4)),
        ("tile", "sinks are taken in base 2", "mask=valid, other=0.0) * LOG2_E", "mask=valid, other=0.0)",
         decodes([30], sinks=4)),
        ("tile", "the sum is not rescaled", "row_sum * alpha + ", "row_sum + ", decodes([90])),
        ("tile", "the result is not rescaled", "acc = acc * alpha[:, None]", "acc = acc", decodes([90])),
        ("tile", "a row without keys is NaN", 'tl.where(new_max == float("-inf"), 0.0, new_max)', "new_max",
         prefills([5], [9])),
        ("tile", "the next tile reads this one's page", "        pages = next_pages", "        pages = pages",
         decodes([90])),
        ("tile", "slopes point the other way", "(key[None, :] - rows.position[:, None])",
         "(rows.position[:, None] - key[None, :])", decodes([90], alibi_slopes=4)),
        ("tile", "dims past a power of two are forgotten",
         "        if shape.BLOCK_TAIL > 0:\n            tail = load_tile",
         "        if shape.BLOCK_TAIL > 9999:\n            tail = load_tile", decodes([30], {"head_dim": 80})),
        ("tile", "mask bits are read from the other end", "(index & 7)", "(7 - (index & 7))", prefills_under_bits),
        ("tile", "a custom mask is ignored", "if scoring.MASK_KIND != MASK_NONE:\n                seen",
         "if scoring.MASK_KIND == 99:\n                seen", prefills_under_bits),
        ("tile", "the scale of keys is forgotten", "scale = sm_scale * tl.load(k_scale + kv_head)", "scale = sm_scale",
         decodes([30], k_scale=2)),
        ("tile", "the scale of values is forgotten", "output_scale = tl.load(v_scale + kv_head)", "output_scale = 1.0",
         decodes([30], v_scale=2)),
        ("tile", "offsets in a page are forgotten", "((start + lane) % PAGE_SIZE).to(tl.int64)",
         "((start + lane) % 1).to(tl.int64)", decodes([30])),
        ("paged_cache", "the last key of the last page is not seen", "(pages - 1) * page_size + last_page_len,",
         "(pages - 1) * page_size + last_page_len - 1,", decodes([30])),
        ("paged_cache", "the slot after the last key is read", "(pages - 1) * page_size + last_page_len,",
         "(pages - 1) * page_size + last_page_len + 1,", decodes([30])),
        ("paged_cache", "a request without pages has what its last page is said to hold",
         "torch.where(pages > 0, (pages - 1) * page_size + last_page_len, 0)",
         "((pages - 1).clamp(min=0) * page_size + last_page_len)", decodes_without_pages),
        ("decode_paged", "the query stands one past the last key of the last page",
         "length = (page_count - 1) * PAGE_SIZE + tl.load(last_page_len + request)",
         "length = (page_count - 1) * PAGE_SIZE + tl.load(last_page_len + request) + 1", decodes([90], window_left=20)),
        ("decode_paged", "a last page of one key is taken for full",
         "length = (page_count - 1) * PAGE_SIZE + tl.load(last_page_len + request)",
         "length = page_count * PAGE_SIZE", decodes([81], window_left=20)),
        ("prefill_attention", "prefill does not see the last key of the last page",
         "kv_len = (page_count - 1) * PAGE_SIZE + tl.load(last_page_len + request)",
         "kv_len = (page_count - 1) * PAGE_SIZE + tl.load(last_page_len + request) - 1", prefills([30], [9])),
        ("prefill_attention", "prefill reads the slot after the last key",
         "kv_len = (page_count - 1) * PAGE_SIZE + tl.load(last_page_len + request)",
         "kv_len = (page_count - 1) * PAGE_SIZE + tl.load(last_page_len + request) + 1",
         prefills([30], [9], Masking(causal=False))),
        ("prefill_attention", "prefill takes the last page for full",
         "kv_len = (page_count - 1) * PAGE_SIZE + tl.load(last_page_len + request)",
         "kv_len = page_count * PAGE_SIZE", prefills([30], [9])),
        ("prefill_attention", "prefill without pages sees what the last page is said to hold",
         "kv_len = tl.where(page_count > 0, kv_len, 0)", "kv_len = tl.maximum(kv_len, 0)", prefills_without_pages),
        ("prefill_attention", "the first key of the next request is read",
         "kv_len = tl.load(kv_indptr + request + 1) - kv_begin",
         "kv_len = tl.load(kv_indptr + request + 1) - kv_begin + 1", prefills_ragged),
        ("prefill_attention", "the last key of a request is not seen",
         "kv_len = tl.load(kv_indptr + request + 1) - kv_begin",
         "kv_len = tl.load(kv_indptr + request + 1) - kv_begin - 1", prefills_ragged),
        ("tile", "a page is looked up one key late", "tl.load(page_ids + keys // PAGE_SIZE, mask=valid, other=0)",
         "tl.load(page_ids + (keys + 1) // PAGE_SIZE, mask=valid & (keys + 1 < load_high), other=0)",
         prefills([30], [9])),
        ("tile", "keys are looked up in the next page",
         "tl.load(page_ids + first // PAGE_SIZE, mask=valid, other=0)",
         "tl.load(page_ids + (first + PAGE_SIZE) // PAGE_SIZE, mask=valid & (first + PAGE_SIZE < load_high), other=0)",
         decodes([30])),
        ("decode_paged", "the window is one too small", "length - 1 - window_left", "length - window_left",
         decodes([90], window_left=20)),
        ("decode_paged", "the window is one too large", "length - 1 - window_left", "length - 2 - window_left",
         decodes([90], window_left=20)),
        ("decode_paged", "query heads are interleaved", "head = kv_head * GROUP + row",
         "head = row * KV_HEADS + kv_head",
         decodes([30])),
        ("decode_paged", "every unit starts at the first key", "start = tl.load(units + unit * 4 + 1)",
         "start = tl.load(units + unit * 4 + 1) * 0", decodes([700])),
        ("work_units", "units are not aligned",
         "(items + count - 1) // count + alignment - 1) // alignment * alignment",
         "(items + count - 1) // count)", divides),
        ("work_units", "a rest of keys is a unit", "(items + rounding) // size",
         "(items + size - 1) // size", divides),
        ("work_units", "nobody writes the zeros of an empty request", "tl.maximum(per_unit, 1), units_min)",
         "tl.maximum(per_unit, 1), 0)", divides),
        ("work_units", "the last unit goes too far", "tl.minimum(unit_start + per_unit, stop)",
         "unit_start + per_unit", divides),
        ("work_units", "a request's first item is forgotten", "unit_start = start + index * per_unit",
         "unit_start = index * per_unit", divides),
        ("merge_splits", "weights are natural", "weight = tl.exp2(part_lse - base)", "weight = tl.exp(part_lse - base)",
         merges),
        ("merge_splits", "only the first block of units is merged", "for block in range(0, count, BLOCK_SPLITS)",
         "for block in range(0, BLOCK_SPLITS, BLOCK_SPLITS)", merges),
        ("merge_splits", "a later block does not rescale", "acc = acc * alpha + ", "acc = acc + ", merges),
        ("prefill_rows", "queries are left-aligned", "position = kv_len - q_len + token",
         "position = token + 0 * q_len",
         prefills([30], [9])),
        ("prefill_rows", "a query does not see itself", "tl.minimum(row_high, position + 1)",
         "tl.minimum(row_high, position)", prefills([30], [9])),
        ("prefill_rows", "the window is one too small", "tl.maximum(low, position - window_left)",
         "tl.maximum(low, position - window_left + 1)", prefills([90], [9], window_left=5)),
        ("prefill_rows", "the window is one too large", "tl.maximum(low, position - window_left)",
         "tl.maximum(low, position - window_left - 1)", prefills([90], [9], window_left=5)),
        ("prefill_rows", "tiles that only the last row sees are not masked", "tl.minimum(kv_len, first + 1)",
         "tl.minimum(kv_len, last + 1)", prefills([64], [64])),
        ("prefill_rows", "tiles that only the first row sees are not masked", "free_low = visible_from(last,",
         "free_low = visible_from(first,", prefills([160], [60], window_left=64)),
        ("prefill_rows", "a chunk is a window", "tl.maximum(low, position // chunk_size * chunk_size)",
         "tl.maximum(low, position - chunk_size + 1)",
         prefills([60], [20], Masking(causal=True, chunk_size=16))),
        ("prefill_rows", "rows of a mask are too short", "mask_row = token.to(tl.int64) * kv_len",
         "mask_row = token.to(tl.int64) * q_len", prefills_under_bits),
        ("prefill_attention", "values of another request are read", "v + kv_begin.to(tl.int64) * stride_v_token", "v",
         prefills_ragged),
    )
]  # fmt: skip


def use(planted: ModuleType, fault: Fault, patch: pytest.MonkeyPatch) -> None:
    """Replaces the real functions by the planted ones in every module that uses them."""
    real = sys.modules[MODULES[fault.module]]
    users = [module for name, module in sys.modules.items() if name.startswith("quire_kernels")]
    for name, function in vars(real).items():
        written = getattr(function, "fn", function)  # `fn` is the function that Triton decorated
        if isinstance(written, type) or getattr(written, "__module__", None) != real.__name__:
            continue
        for user in users:
            if vars(user).get(name) is function:
                patch.setattr(user, name, getattr(planted, name))


def forget_compiled() -> None:
    """Makes Triton compile kernels again: a compiled kernel would keep calling a replaced function."""
    for name, module in sys.modules.items():
        if name.startswith("quire_kernels"):
            for function in vars(module).values():
                if isinstance(function, JITFunction):
                    function.hash = None
                    function.device_caches.clear()


@pytest.mark.parametrize(("fault", "check"), FAULTS, ids=[f"{f.module}: {f.title}" for f, _ in FAULTS])
def test_a_planted_fault_is_noticed(
    fault: Fault, check: Check, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    check(device)
    with monkeypatch.context() as patch:
        use(plant(fault, tmp_path), fault, patch)
        forget_compiled()
        with pytest.raises(AssertionError):
            check(device)
    forget_compiled()
