"""What FlashInfer's calls take and these do not need: what of it is accepted, and what is refused by name.

A program that comes from FlashInfer keeps its calls. An argument that means something here is a parameter of the
wrapper; all others arrive as `**others` and are looked up in the table of the call. Names, order and defaults were read
from FlashInfer 0.7.2 (`decode.py`, `prefill.py`, `cascade.py`, `mla/_batch_mla/_wrapper.py`).

Two kinds. A hint says how FlashInfer should compute, or says again what the page table says: any value is accepted, and
the result is the same. Anything else changes the result, or promises something: only the value that asks for nothing is
accepted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch


class Rule(NamedTuple):
    """Which values of an argument are accepted."""

    allowed: tuple[object, ...] | None  # None: all, it is a hint
    why: str = ""


HINT = Rule(None)
NOT_HERE = Rule((None, False, 0), "these kernels cannot do this")
_ROTATED = "keys are stored rotated"

_CONSTRUCTOR = {
    "backend": Rule(("auto", "fa2", "fa3"), "there is one implementation, and other backends take other page tables"),
    "jit_args": Rule((None,), "kernels are not generated"),
    "jit_kwargs": Rule((None,), "kernels are not generated"),
    "variant_owns_mask": Rule((False,), "kernels are not generated"),
}
_SCORING = dict.fromkeys(
    ("prefix_len_ptr", "token_pos_in_items_ptr", "token_pos_in_items_len", "max_item_len_ptr"),
    Rule((None, 0), "multi-item scoring is not done; a custom_mask can say the same"),
)
# The page table has these already. Where rotation happens, which is not here, rope_* would say how.
_PLAN_HINTS = dict.fromkeys(("non_blocking", "rope_scale", "rope_theta", "seq_lens", "block_tables"), HINT)
_PREFILL_PLAN = {
    **_PLAN_HINTS,
    **_SCORING,
    # Of prefill no request is ever split over its keys, so that both of these hold.
    **dict.fromkeys(("fixed_split_size", "disable_split_kv"), HINT),
    **dict.fromkeys(("seq_lens_q", "max_token_per_sequence", "max_sequence_kv", "uniform_q_len"), HINT),
}
_SKIP = {"skip_softmax_threshold_scale_factor": Rule((None,), "every key that a query sees counts")}
_FP4 = {"kv_cache_sf": Rule((None,), "caches of 4 bits are not read")}
_DENSE = dict.fromkeys(
    ("metadata", "cum_seq_lens_q", "block_tables", "seq_lens", "max_q_len"),
    Rule((None,), "give qo_indptr, kv_indptr, kv_indices and kv_len_arr"),
)
_MLA_SCALES = ("o_scale", "ckv_scale", "ckv_scale_arr", "kpe_scale", "bmm1_scale", "bmm2_scale")

CONSTRUCTOR = {name: _CONSTRUCTOR[name] for name in ("backend", "jit_args")}
PREFILL_CONSTRUCTOR = _CONSTRUCTOR
MLA_CONSTRUCTOR = {"backend": _CONSTRUCTOR["backend"]}

DECODE_PLAN = {
    **_PLAN_HINTS,
    "fixed_split_size": Rule((None,), "the size of a split follows from the batch; disable_split_kv fixes the result"),
    "q_len_per_req": Rule((1,), "several queries per request are BatchPrefillWithPagedKVCacheWrapper's"),
    "window_right": Rule((0,), "no query sees a later key"),
    "is_causal": Rule((None, False), "one query per request sees all its keys"),
}
PREFILL_PLAN = _PREFILL_PLAN
RAGGED_PLAN = {
    **{name: rule for name, rule in _PREFILL_PLAN.items() if name != "block_tables"},
    **dict.fromkeys(("v_indptr", "o_indptr"), Rule((None,), "values lie as keys do, results as queries")),
}
MLA_PLAN = {
    **_DENSE,
    **dict.fromkeys(("query_layout", "kv_cache_layout", "lse_mode", "enable_pdl"), HINT),
    "output_scale": Rule(("none",), "results are not quantised"),
    "scale_mode": Rule(("default",), "there are no scales"),
    **dict.fromkeys(("use_profiler", "skip_softmax", "use_sinks"), NOT_HERE),
}

DECODE_RUN = {"enable_pdl": HINT, **_SKIP, **_FP4, "q_len_per_req": Rule((None, 1), DECODE_PLAN["q_len_per_req"].why)}
RAGGED_RUN = {
    "enable_pdl": HINT,
    **_FP4,
    "lse_layout": Rule(("NH",), "transpose lse"),
    "o_scale": Rule((None, 1.0), "results are not quantised"),
}
PREFILL_RUN = {
    **{name: rule for name, rule in RAGGED_RUN.items() if name != "o_scale"},
    **_SKIP,
    **dict.fromkeys(("use_fp16_softmax", "uses_spcompress"), HINT),  # FlashInfer, too, heeds them on one backend only
}
MLA_RUN = {
    **_SKIP,
    **dict.fromkeys(_MLA_SCALES, Rule((None,), "latents of 8 bits are not read or written")),
    **dict.fromkeys(("profiler_buffer", "sinks"), NOT_HERE),
    **dict.fromkeys(("kv_len", "page_table"), Rule((None,), "plan has them")),
}


def check_others(call: str, rules: Mapping[str, Rule], others: Mapping[str, Any]) -> None:
    """Refuses what a call cannot honour.

    Args:
        call: its name, for the message.
        rules: one of the tables of this file.
        others: what was given besides the parameters.

    Raises:
        TypeError: there is no such argument in FlashInfer either.
        ValueError: an argument has a value that cannot be honoured; names it.
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
    """A tensor is none of them; it does not compare as other values do."""
    return not isinstance(value, torch.Tensor) and value in allowed
