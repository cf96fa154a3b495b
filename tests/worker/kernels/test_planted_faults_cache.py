"""Faults planted in the kernels that write and move the cache, merge, pack and sample: tests must notice each of them.

Every comparison runs first with the unchanged module (in its own test file, and here), and then with one fault.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from quire_kernels.ops import (
    append_paged_kv_cache,
    append_slots,
    copy_blocks,
    gated_activation,
    merge_states,
    pack_mask,
    rms_norm,
    rotate_append,
    sampling,
    swap_blocks,
)
from quire_kernels.shared.fp8 import E4M3, E5M2

from tests.worker.kernels.append_cases import (
    append_matches,
    append_refuses,
    slots_match,
    slots_quantise,
    slots_refuse,
    unchecked_append_matches,
)
from tests.worker.kernels.planting import Fault, plant
from tests.worker.kernels.test_around_products import (
    activations_match,
    normed_rotations_match,
    norms_match,
    rotations_match,
)
from tests.worker.kernels.test_copy_blocks import PAIRS, copies_match
from tests.worker.kernels.test_merge_states import in_place_matches, pairs_match, states_match
from tests.worker.kernels.test_pack_mask import packing_matches
from tests.worker.kernels.test_sampling import greedy_matches, samples_match
from tests.worker.kernels.test_swap_blocks import swap_matches

Comparison = Callable[[ModuleType, torch.device], bool]


def append_to_floats(module: ModuleType, device: torch.device) -> bool:
    return append_matches(module, device)


def append_to_fp8(module: ModuleType, device: torch.device) -> bool:
    return append_matches(module, device, fp8=E4M3)


def append_to_e5m2(module: ModuleType, device: torch.device) -> bool:
    return append_matches(module, device, fp8=E5M2)


def copy_chain(module: ModuleType, device: torch.device) -> bool:
    return copies_match(module, PAIRS["a chain"], device)


def copy_circle(module: ModuleType, device: torch.device) -> bool:
    return copies_match(module, PAIRS["two blocks change places"], device)


REAL: dict[Comparison, ModuleType] = {
    append_to_floats: append_paged_kv_cache,
    append_to_fp8: append_paged_kv_cache,
    append_to_e5m2: append_paged_kv_cache,
    unchecked_append_matches: append_paged_kv_cache,
    append_refuses: append_paged_kv_cache,
    slots_match: append_slots,
    slots_refuse: append_slots,
    slots_quantise: append_slots,
    copy_chain: copy_blocks,
    copy_circle: copy_blocks,
    swap_matches: swap_blocks,
    states_match: merge_states,
    pairs_match: merge_states,
    in_place_matches: merge_states,
    packing_matches: pack_mask,
    samples_match: sampling,
    greedy_matches: sampling,
    norms_match: rms_norm,
    activations_match: gated_activation,
    rotations_match: rotate_append,
    normed_rotations_match: rotate_append,
}

TOKEN = ("append_paged_kv_cache",)
BYTE = ("append_token", "append_paged_kv_cache")
SLOTS = ("append_slots",)
# fmt: off
FAULTS: list[tuple[Comparison, Fault]] = [
    (norms_match, Fault("the mean is a sum", "rms_norm", "/ SIZE + eps", "+ eps")),
    (norms_match, Fault("epsilon is forgotten", "rms_norm", "/ SIZE + eps", "/ SIZE")),
    (norms_match, Fault("weights are all counted from 0", "rms_norm", "scale * (weight + offset)", "scale * weight")),
    (norms_match, Fault("every row is the first", "rms_norm", "x_ptr + row * row_stride", "x_ptr")),
    (activations_match, Fault("the halves change places", "gated_activation",
        "active * up", "up / (1.0 + tl.exp(-up)) * gate")),
    (activations_match, Fault("only the first block is written", "gated_activation",
        "tl.program_id(1) * BLOCK + tl.arange", "tl.arange")),
    (activations_match, Fault("gelu is silu", "gated_activation", "    if GELU:", "    if False:")),
    (activations_match, Fault("gelu has no cube", "gated_activation",
        "(gate + 0.044715 * gate * gate * gate)", "gate")),
    (rotations_match, Fault("turned the other way", "rotate_append",
        "tl.where(element < half, -y, y)", "tl.where(element < half, y, -y)")),
    (rotations_match, Fault("what lies beyond the rotary dims is turned", "rotate_append",
        "sine = tl.load(sine_ptr + token * table_stride + element, mask=is_turned, other=0.0)",
        "sine = tl.load(sine_ptr + token * table_stride + element, mask=is_turned, other=1.0)")),
    (rotations_match, Fault("padding is written", "rotate_append",
        "(slot >= 0) & (slot < slot_count)", "(slot < slot_count)")),
    (rotations_match, Fault("a slot outside the pool is written to one of its pages", "rotate_append",
        "is_written = (slot >= 0) & (slot < slot_count)", "is_written = slot >= 0\n    slot = slot % slot_count")),
    (rotations_match, Fault("all keys are those of the first head", "rotate_append",
        "(head - QUERY_HEADS) * k_head_stride", "0 * k_head_stride")),
    (rotations_match, Fault("values are written where keys belong", "rotate_append",
        "target = v_ptr + page", "target = k_ptr + page")),
    (rotations_match, Fault("all tokens are at the first position", "rotate_append",
        "cosine_ptr + token * table_stride", "cosine_ptr")),
    (normed_rotations_match, Fault("keys are normed as queries are", "rotate_append",
        "weight_ptr = key_weight_ptr", "weight_ptr = query_weight_ptr")),
    (normed_rotations_match, Fault("the partner has the weight of the element", "rotate_append",
        "weight_ptr + partner", "weight_ptr + element")),
    (normed_rotations_match, Fault("weights of heads are all counted from 0", "rotate_append",
        "turned * scale * (own + offset)", "turned * scale * own")),
    (append_to_floats, Fault("every token goes to the first slot of its page", "append_paged_kv_cache",
        "(position % PAGE_SIZE).to", "(position * 0).to")),
    (append_to_floats, Fault("a negative position is no padding", "append_paged_kv_cache",
        "(request < batch_size) & (position >= 0)", "(request < batch_size)")),
    (append_to_floats, Fault("all tokens belong to the first request", "append_paged_kv_cache",
        "entry = tl.load(kv_indptr_ptr + request) +", "entry = tl.load(kv_indptr_ptr) +")),
    (append_to_floats, Fault("pages are taken for consecutive", "append_paged_kv_cache",
        "page = tl.load(kv_indices_ptr + entry)", "page = entry")),
    (append_to_floats, Fault("values are written where keys belong", "append_token",
        "value_ptr, v_ptr, v_scale_ptr,", "value_ptr, k_ptr, v_scale_ptr,", TOKEN)),
    (append_to_fp8, Fault("values are quantised with the scale of the keys", "append_token",
        "value_ptr, v_ptr, v_scale_ptr,", "value_ptr, v_ptr, k_scale_ptr,", TOKEN)),
    (append_to_fp8, Fault("scales multiply", "append_token",
        "tl.div_rn(data, tl.broadcast_to(scale[:, None], data.shape))", "data * scale[:, None]", TOKEN)),
    (append_to_fp8, Fault("all heads have the scale of the first", "append_token",
        "head * SCALE_STRIDE", "head * 0", TOKEN)),
    (append_to_floats, Fault("all heads are written to the first", "append_token",
        "target += head[:, None] * head_stride", "target += head[:, None] * 0", TOKEN)),
    (append_to_fp8, Fault("fp8 is cut off instead of rounded", "fp8",
        "(magnitude + HALF + ((magnitude >> DROPPED) & 1))",
        "magnitude", BYTE)),
    (append_to_fp8, Fault("fp8 does not saturate", "fp8", "tl.minimum(magnitude, LARGEST)", "magnitude", BYTE)),
    (append_to_fp8, Fault("fp8 loses its subnormals", "fp8",
        "subnormal = shifted.to(tl.uint32, bitcast=True) - ((127 + EXPONENT) << 23)",
        "subnormal = magnitude * 0", BYTE)),
    (append_to_fp8, Fault("fp8 loses its sign", "fp8", "(byte | sign)", "byte", BYTE)),
    (append_to_e5m2, Fault("e5m2 has the exponents of e4m3", "fp8",
        "fp8_from_float(x, 2, 15,", "fp8_from_float(x, 2, 7,", BYTE)),
    (append_to_e5m2, Fault("e5m2 saturates where e4m3 does", "fp8", "0x47600000", "0x43E00000", BYTE)),
    (append_to_e5m2, Fault("an e5m2 cache is written in e4m3", "append_token", "data = e5m2_from_float(data)",
        "data = e4m3_from_float(data)", TOKEN)),
    (unchecked_append_matches, Fault("the page after a request's last is its own", "append_paged_kv_cache",
        "if entry < tl.load(kv_indptr_ptr + request + 1):", "if entry <= tl.load(kv_indptr_ptr + request + 1):")),
    (append_refuses, Fault("the slot after the last token of a request may be written", "append_paged_kv_cache",
        "position >= lengths[request]", "position > lengths[request]")),
    (append_refuses, Fault("the last slot of a request may not be written", "append_paged_kv_cache",
        "position >= lengths[request]", "position >= lengths[request] - 1")),
    (append_refuses, Fault("two tokens may share a slot of a request", "append_paged_kv_cache",
        "if len(set(slots)) != len(slots):", "if not slots:")),
    (slots_match, Fault("every slot is the first of its page", "append_slots", "offset = slot % PAGE_SIZE",
        "offset = slot % PAGE_SIZE * 0")),
    (slots_match, Fault("slots lie one further in their page", "append_slots", "offset = slot % PAGE_SIZE",
        "offset = (slot + 1) % PAGE_SIZE")),
    (slots_match, Fault("every token goes to the slot of the first", "append_slots",
        "tl.load(slot_mapping_ptr + token)", "tl.load(slot_mapping_ptr + token * 0 + 2)")),
    (slots_match, Fault("a negative slot is no padding", "append_slots", "(slot >= 0) & (slot < slot_count)",
        "slot < slot_count")),
    (slots_match, Fault("the slot after the last page belongs to the pool", "append_slots",
        "(slot >= 0) & (slot < slot_count)", "(slot >= 0) & (slot <= slot_count)")),
    (slots_match, Fault("the last slot of the last page does not belong to the pool", "append_slots",
        "(slot >= 0) & (slot < slot_count)", "(slot >= 0) & (slot < slot_count - 1)")),
    (slots_match, Fault("values go where slots of keys are", "append_slots",
        "key_ptr, value_ptr, k_ptr, v_ptr, k_scale", "key_ptr, value_ptr, k_ptr, k_ptr, k_scale")),
    (slots_refuse, Fault("the slot after the last page is taken", "append_slots", "max(slots) >= slot_count",
        "max(slots) > slot_count")),
    (slots_refuse, Fault("the last slot of the last page is refused", "append_slots", "max(slots) >= slot_count",
        "max(slots) >= slot_count - 1")),
    (slots_refuse, Fault("two tokens may share a slot", "append_slots", "if len(set(slots)) != len(slots):",
        "if not slot_count:")),
    (slots_quantise, Fault("values at slots are quantised with the scale of the keys", "append_token",
        "value_ptr, v_ptr, v_scale_ptr,", "value_ptr, v_ptr, k_scale_ptr,", SLOTS)),
    (slots_quantise, Fault("all heads at a slot have the scale of the first", "append_token", "head * SCALE_STRIDE",
        "head * 0", SLOTS)),
    (copy_chain, Fault("chains run backwards", "copy_blocks", "tuple(chain_steps)", "tuple(chain_steps[::-1])")),
    (copy_circle, Fault("a circle reads what it has overwritten", "copy_blocks",
        "(None if source == first else source, destination)", "(source, destination)")),
    (copy_circle, Fault("block 0 is never held", "copy_blocks", "mask & (held_block >= 0)", "mask & (held_block > 0)")),
    (copy_chain, Fault("only the first chunk is copied", "copy_blocks", "word = chunk * CHUNK_WORDS + ", "word = ")),
    (copy_chain, Fault("only the first layer is copied", "copy_blocks", "% buffer_count\n", "% 1\n")),
    (swap_matches, Fault("buffers overwrite each other in the row", "swap_blocks", "row * staging_stride + offset",
        "row * staging_stride")),
    (swap_matches, Fault("rows overwrite each other", "swap_blocks", "row * staging_stride + offset", "offset")),
    (swap_matches, Fault("scattered blocks go to the first ones", "swap_blocks",
        "block = tl.load(buffers_ptr + buffer_count * 4 + row)", "block = row")),
    (states_match, Fault("NaN of an empty state leaks", "merge_states", "mask=mask & exists[:, None]", "mask=mask")),
    (states_match, Fault("the lse is taken for natural", "merge_states", "new = tl.exp2(s - anchor)",
        "new = tl.exp(s - anchor)")),
    (states_match, Fault("earlier states are not scaled down", "merge_states", "merged * old[:, None] +", "merged +")),
    (states_match, Fault("-inf minus -inf", "merge_states", "old = tl.exp2(before - anchor)",
        "old = tl.exp2(before - largest)")),
    (states_match, Fault("the last state is left out", "merge_states", "while state < state_count:",
        "while state < state_count - 1:")),
    (pairs_match, Fault("NaN of an empty second state leaks", "merge_states",
        "mask=mask & has_b[:, None]", "mask=mask")),
    (pairs_match, Fault("the weights are exchanged", "merge_states",
        "v_a * weight_a[:, None] + v_b * weight_b[:, None]",
        "v_a * weight_b[:, None] + v_b * weight_a[:, None]")),
    (pairs_match, Fault("the weights do not add up to one", "merge_states", " / divisor[:, None]", "")),
    (in_place_matches, Fault("rows outside the mask are merged", "merge_states", "(tl.load(mask_ptr + row) != 0)",
        "(tl.load(mask_ptr + row) < 2)")),
    (in_place_matches, Fault("the mask is turned round", "merge_states", "(tl.load(mask_ptr + row) != 0)",
        "(tl.load(mask_ptr + row) == 0)")),
    (in_place_matches, Fault("the mask is forgotten", "merge_states",
        "_launch_pair(v, s, v_other.contiguous(), s_other.contiguous(), v, s, mask)",
        "_launch_pair(v, s, v_other.contiguous(), s_other.contiguous(), v, s, None)")),
    (in_place_matches, Fault("only the state that is merged counts", "merge_states",
        "_launch_pair(v, s, v_other.contiguous(), s_other.contiguous(), v, s, mask)",
        "_launch_pair(v_other.contiguous(), s_other.contiguous(), v_other, s_other, v, s, mask)")),
    (packing_matches, Fault("the highest bit comes first", "pack_mask",
        "place if IS_LITTLE else 7 - place", "7 - place")),
    (packing_matches, Fault("the next request fills the last byte up", "pack_mask", "mask=bit < bit_count",
        "mask=bit < bit_count + 1")),
    (packing_matches, Fault("requests do not start at a byte of their own", "pack_mask",
        "packed_ptr + output + byte", "packed_ptr + begin // 8 + byte")),
    (samples_match, Fault("the temperature is ignored", "sampling", "logits.to(tl.float32) * inverse_temperature",
        "logits.to(tl.float32)")),
    (samples_match, Fault("top_k is ignored", "sampling", "if (top_k > 0) &", "if (top_k < 0) &")),
    (samples_match, Fault("top_p is taken of the likeliest token", "sampling",
        "limit = top_p * total", "limit = top_p")),
    (samples_match, Fault("top_p counts what top_k dropped", "sampling", "largest, lowest, 0.0, BLOCK",
        "largest, 0, 0.0, BLOCK")),
    (samples_match, Fault("min_p is ignored", "sampling", " & (weight >= min_p)", "")),
    (samples_match, Fault("negative numbers are in the wrong order", "sampling", "bits ^ 0xFFFFFFFF", "bits")),
    (samples_match, Fault("the token is counted from its tile", "sampling", "token = start + first", "token = first")),
    (samples_match, Fault("dropped tokens count in the draw", "sampling", "target = tl.load(uniform_ptr + row) * total",
        "target = tl.load(uniform_ptr + row) * total * 1.1")),
    (greedy_matches, Fault("the last of equals is taken", "sampling",
        "tl.min(tl.where(best == largest, best_token, vocabulary), axis=0)",
        "tl.max(tl.where(best == largest, best_token, 0), axis=0)")),
    (greedy_matches, Fault("the end of the vocabulary is not looked at", "sampling",
        "    for start in range(0, vocabulary, BLOCK):\n        x = _load_scaled(row_ptr, start, vocabulary, stride, "
        "inverse_temperature, BLOCK)\n        nan_count", "    for start in range(0, vocabulary - BLOCK, BLOCK):\n"
        "        x = _load_scaled(row_ptr, start, vocabulary, stride, inverse_temperature, BLOCK)\n        nan_count")),
]
# fmt: on


@pytest.mark.parametrize("comparison", REAL, ids=lambda comparison: comparison.__name__)
def test_without_a_fault_nothing_is_noticed(comparison: Comparison, device: torch.device) -> None:
    assert comparison(REAL[comparison], device)


@pytest.mark.parametrize(("comparison", "fault"), FAULTS, ids=[fault.title for _, fault in FAULTS])
def test_a_planted_fault_is_noticed(comparison: Comparison, fault: Fault, tmp_path: Path, device: torch.device) -> None:
    assert not comparison(plant(fault, tmp_path), device), fault.title
