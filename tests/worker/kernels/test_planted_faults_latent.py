"""Faults planted in latent attention and in the cascade over shared prefixes: tests must notice each of them.

The comparisons come from the kernels' own test files. Each check runs first with the unchanged module, then with a
fault.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from quire_kernels.flashinfer import cascade
from quire_kernels.ops import mla_paged

from tests.worker.kernels.planting import Fault, plant
from tests.worker.kernels.test_cascade import levels_match, options_match
from tests.worker.kernels.test_mla_paged import latents_match

Comparison = Callable[[ModuleType, torch.device], None]


def decode(module: ModuleType, device: torch.device) -> None:
    latents_match(module, device, [19, 0, 67])


def decode_split(module: ModuleType, device: torch.device) -> None:
    latents_match(module, device, [600, 3], heads=2)


def decode_apart(module: ModuleType, device: torch.device) -> None:
    latents_match(module, device, [33, 5], arrange=torch.Tensor.contiguous)


def prefill(module: ModuleType, device: torch.device) -> None:
    latents_match(module, device, [20, 4, 33], [9, 1, 12], heads=3)


REAL: dict[Comparison, ModuleType] = {
    decode: mla_paged,
    decode_split: mla_paged,
    decode_apart: mla_paged,
    prefill: mla_paged,
    levels_match: cascade,
    options_match: cascade,
}

# fmt: off
FAULTS: list[tuple[Comparison, Fault]] = [
    (decode, Fault("the scale of latents is taken in base 2", "mla_paged", "s * (sm_scale * LOG2_E)", "s * sm_scale")),
    (decode, Fault("the positional part is forgotten", "mla_paged",
        's = tl.dot(q_rope, tl.trans(as_operand(rope, q, UPCAST)), s, input_precision="ieee")', "s = s")),
    (decode, Fault("the slot after the last latent is read", "mla_paged", "key_valid = keys < stop",
        "key_valid = keys <= stop")),
    (decode, Fault("the last latent of the last page is not seen", "mla_paged",
        "kv_len = tl.load(kv_lengths + request)\n", "kv_len = tl.load(kv_lengths + request) - 1\n"
        "    stop = tl.minimum(stop, kv_len)\n")),
    (decode, Fault("all requests have the pages of the first", "mla_paged",
        "page_ids = page_indices + tl.load(page_indptr + request)", "page_ids = page_indices")),
    (decode, Fault("the next tile reads this one's page of latents", "mla_paged", "        pages = next_pages",
        "        pages = pages")),
    (decode, Fault("all heads are the first", "mla_paged", "head = (row % HEADS).to(tl.int64)",
        "head = (row % HEADS * 0).to(tl.int64)")),
    (decode, Fault("all queries are those of the first request", "mla_paged", "q_row = (q_begin + token).to(tl.int64)",
        "q_row = (q_begin * 0 + token).to(tl.int64)")),
    (decode_apart, Fault("positions are looked for at the strides of latents", "mla_paged",
        "token_offsets(pages, tile, kpe_strides,", "token_offsets(pages, tile, ckv_strides,")),
    (decode_split, Fault("units of a split request write over each other", "mla_paged", "if siblings == 1:",
        "if siblings >= 1:")),
    (decode_split, Fault("all units have the partial results of the first", "mla_paged",
        "partial_row = unit.to(tl.int64) * HEADS + head", "partial_row = unit.to(tl.int64) * 0 + head")),
    (decode_split, Fault("nobody merges the units", "mla_paged",
        "    if division.partial_out is not None and division.partial_lse is not None:", "    if tokens < 0:")),
    (prefill, Fault("a query does not see its own latent", "mla_paged", "kv_len - q_len + token + 1)",
        "kv_len - q_len + token)")),
    (prefill, Fault("queries of latents are left-aligned", "mla_paged",
        "row_high = tl.minimum(row_high, kv_len - q_len + token + 1)", "row_high = tl.minimum(row_high, token + 1)")),
    (prefill, Fault("a block ends before the last latent that its last row sees", "mla_paged",
        "row_stop) - 1) // HEADS + 1)", "row_stop) - 1) // HEADS)")),
    (prefill, Fault("a block starts at the latent of its first row", "mla_paged", "        start = kv_len * 0",
        "        start = row_start // BLOCK_N * BLOCK_N")),
    (levels_match, Fault("what is shared is causal too", "cascade",
        "causal and level == len(self._levels) - 1", "causal")),
    (levels_match, Fault("the first level is causal instead of the last", "cascade",
        "causal and level == len(self._levels) - 1", "causal and level == 0")),
    (levels_match, Fault("only the last level counts", "cascade",
        "merge_state_in_place(out, lse, level_out, level_lse)", "out, lse = level_out, level_lse")),
    (levels_match, Fault("only the first level counts", "cascade",
        "merge_state_in_place(out, lse, level_out, level_lse)", "pass")),
    (levels_match, Fault("a level is merged with itself", "cascade",
        "merge_state_in_place(out, lse, level_out, level_lse)", "merge_state_in_place(out, lse, out, lse)")),
    (options_match, Fault("every level counts the sinks", "cascade",
        "sinks if level == len(self._levels) - 1 else None", "sinks")),
    (options_match, Fault("levels have the default scale", "cascade", "sm_scale=sm_scale,", "sm_scale=None,")),
    (options_match, Fault("levels are not capped", "cascade", "logits_soft_cap=logits_soft_cap,",
        "logits_soft_cap=None,")),
    (options_match, Fault("levels forget the scale of values", "cascade", "k_scale=k_scale, v_scale=v_scale,",
        "k_scale=k_scale,")),
    (options_match, Fault("levels forget the scale of keys", "cascade", "k_scale=k_scale, v_scale=v_scale,",
        "v_scale=v_scale,")),
]
# fmt: on


@pytest.mark.parametrize("comparison", REAL, ids=lambda comparison: comparison.__name__)
def test_without_a_fault_nothing_is_noticed(comparison: Comparison, device: torch.device) -> None:
    comparison(REAL[comparison], device)


@pytest.mark.parametrize(("comparison", "fault"), FAULTS, ids=[fault.title for _, fault in FAULTS])
def test_a_planted_fault_is_noticed(comparison: Comparison, fault: Fault, tmp_path: Path, device: torch.device) -> None:
    planted = plant(fault, tmp_path)
    with pytest.raises(AssertionError):
        comparison(planted, device)
