"""Arguments of FlashInfer's calls that these kernels do not use: which values are accepted, and why others are refused.

A program that comes from FlashInfer need not change its calls. An argument that has an effect here is a parameter of
the wrapper. All other arguments arrive as `**others`, and are looked up in the table of the call. Names, order and
defaults come from FlashInfer 0.7.2 (`decode.py`, `prefill.py`, `cascade.py`, `mla/_batch_mla/_wrapper.py`).

There are two kinds. A hint tells FlashInfer how to compute, or repeats the page table: any value is accepted, and the
result is the same. Every other argument changes the result or gives a guarantee, so only its neutral value is accepted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch


class Rule(NamedTuple):
    """The accepted values of an argument."""

    allowed: tuple[object, ...] | None  # None: all values are accepted, because the argument is a hint
    why: str = ""


HINT = Rule(None)
NOT_HERE = Rule((None, False), "these kernels do not support it")
NOT_GENERATED = Rule((None, False), "these kernels are not generated")
NOT_QUANTISED = Rule((None, 1.0), "results are not quantized")
ONE_QUERY = Rule((None, 1), "several queries per request are for BatchPrefillWithPagedKVCacheWrapper")
NO_SKIPPING = Rule((None,), "these kernels skip no key")
NO_FP4 = Rule((None,), "4-bit caches are not supported")

MLA_CONSTRUCTOR = {
    "backend": Rule(("auto", "fa2", "fa3"), "there is one implementation, and other backends use other page tables"),
}
CONSTRUCTOR = {**MLA_CONSTRUCTOR, "jit_args": NOT_GENERATED}
PREFILL_CONSTRUCTOR = {**CONSTRUCTOR, "jit_kwargs": NOT_GENERATED, "variant_owns_mask": NOT_GENERATED}

DECODE_PLAN = {
    # The rope_* arguments describe a rotation that these kernels do not compute. seq_lens and block_tables repeat the
    # page table.
    **dict.fromkeys(("rope_scale", "rope_theta", "non_blocking", "seq_lens", "block_tables"), HINT),
    "fixed_split_size": Rule(
        (None,), "the batch determines the splits; for results independent of the batch use disable_split_kv"
    ),
    "q_len_per_req": ONE_QUERY,
    "window_right": Rule((0,), "a query never sees a later key"),
    "is_causal": Rule((None, False), "one query per request sees all its keys"),
}
_BOTH_PREFILL_PLANS = {
    **dict.fromkeys(("non_blocking", "seq_lens", "seq_lens_q", "max_token_per_sequence", "max_sequence_kv"), HINT),
    "uniform_q_len": HINT,
    # Prefill never splits a request by keys, so what these two arguments ask for always holds.
    **dict.fromkeys(("fixed_split_size", "disable_split_kv"), HINT),
    **dict.fromkeys(
        ("prefix_len_ptr", "token_pos_in_items_ptr", "token_pos_in_items_len", "max_item_len_ptr"),
        Rule((None, 0), "items are not scored separately; use a custom_mask instead"),
    ),
}
PREFILL_PLAN = {**_BOTH_PREFILL_PLANS, "block_tables": HINT}
RAGGED_PLAN = {
    **_BOTH_PREFILL_PLANS,
    **dict.fromkeys(("v_indptr", "o_indptr"), Rule((None,), "values are laid out like keys, and results like queries")),
}
MLA_PLAN = {
    **dict.fromkeys(("query_layout", "kv_cache_layout", "lse_mode", "enable_pdl"), HINT),
    **dict.fromkeys(
        ("metadata", "cum_seq_lens_q", "block_tables", "seq_lens", "max_q_len"),
        Rule((None,), "qo_indptr, kv_indptr, kv_indices and kv_len_arr describe the batch"),
    ),
    **dict.fromkeys(("output_scale", "scale_mode"), Rule(("none", "default"), "nothing is quantized")),
    **dict.fromkeys(("use_profiler", "skip_softmax", "use_sinks"), NOT_HERE),
}

DECODE_RUN = {
    "enable_pdl": HINT,
    "q_len_per_req": ONE_QUERY,
    "skip_softmax_threshold_scale_factor": NO_SKIPPING,
    "kv_cache_sf": NO_FP4,
}
PREFILL_RUN = {
    "lse_layout": Rule(("NH",), "transpose lse"),
    "skip_softmax_threshold_scale_factor": NO_SKIPPING,
    "kv_cache_sf": NO_FP4,
    # FlashInfer itself uses use_fp16_softmax and uses_spcompress on only one of its backends.
    **dict.fromkeys(("enable_pdl", "use_fp16_softmax", "uses_spcompress"), HINT),
}
RAGGED_RUN = {
    "enable_pdl": HINT,
    "lse_layout": PREFILL_RUN["lse_layout"],
    "kv_cache_sf": NO_FP4,
    "o_scale": NOT_QUANTISED,
}
MLA_RUN = {
    "o_scale": NOT_QUANTISED,
    **dict.fromkeys(
        ("ckv_scale", "ckv_scale_arr", "kpe_scale", "bmm1_scale", "bmm2_scale"),
        Rule((None,), "8-bit latents are not supported"),
    ),
    "skip_softmax_threshold_scale_factor": NO_SKIPPING,
    **dict.fromkeys(("kv_len", "page_table"), Rule((None,), "give it to plan instead")),
    **dict.fromkeys(("profiler_buffer", "sinks"), NOT_HERE),
}


def check_others(call: str, rules: Mapping[str, Rule], others: Mapping[str, Any]) -> None:
    """Refuses arguments that a call cannot honor.

    Args:
        call: the call's name, for the message.
        rules: one of the tables of this file.
        others: the arguments that are not parameters of the wrapper.

    Raises:
        TypeError: FlashInfer does not have this argument either.
        ValueError: an argument has a value that cannot be honored; the message names it.
    """
    for name, value in others.items():
        if name not in rules:
            raise TypeError(f"{call}() got an unexpected keyword argument {name!r}")
        allowed, why = rules[name]
        if allowed is not None and not _is_one_of(value, allowed):
            shown = "a tensor" if isinstance(value, torch.Tensor) else repr(value)
            names = " or ".join(repr(one) for one in allowed)
            raise ValueError(f"{name} must be {names}, not {shown}: {why}")


def _is_one_of(value: object, allowed: tuple[object, ...]) -> bool:
    """Returns whether a value is accepted. Tensors never are, because comparing them gives a tensor."""
    return not isinstance(value, torch.Tensor) and value in allowed
