"""Numbers at the limits of every public parameter of the kernels are accepted, or refused with the parameter's name."""

from __future__ import annotations

import functools
import inspect
import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import quire_kernels
import torch
from quire_kernels import extra
from quire_kernels.flashinfer.arguments import HINT, PREFILL_PLAN, RAGGED_PLAN

NO_INTEGERS: list[Any] = [
    "5",
    True,
    1.5,
    64.0,
    math.nan,
    math.inf,
    [1],
    np.float32(4),
    10**5000,
    -(10**5000),
    2**31,
    -2,
]
NO_NUMBERS: list[Any] = ["5", True, math.nan, math.inf, -math.inf, [1], 10**5000, np.float32("nan")]
# Parameter -> the lowest accepted integer, where it is not 1.
LOWEST = {"window_left": -1, "chunk_size": 0, "nnz": 0, "prefix_length": 0, "top_k": 0}
NOT_NEGATIVE = ("logits_soft_cap", "temperature", "top_p", "min_p")
POSITIVE = ("append_paged_kv_cache k_scale", "append_paged_kv_cache v_scale")
WITHOUT_EFFECT = ("rope_scale", "rope_theta")  # These named parameters are only hints.
PAGES = {"paged_kv_indptr": [0, 1], "paged_kv_indices": [0], "paged_kv_last_page_len": [3]}
INDPTR, INDICES, LAST = (torch.tensor(each, dtype=torch.int32) for each in PAGES.values())
ONE = torch.tensor([0, 1], dtype=torch.int32)
FLOAT = {"q_data_type": torch.float32, "kv_data_type": torch.float32}
CACHE = torch.zeros(2, 2, 16, 2, 64)
WRAPPERS = {
    "BatchDecodeWithPagedKVCacheWrapper": {
        "indptr": INDPTR, "indices": INDICES, "last_page_len": LAST, "num_qo_heads": 4, "num_kv_heads": 2,
        "head_dim": 64, "page_size": 16, **FLOAT,
    },
    "BatchPrefillWithPagedKVCacheWrapper": {
        "qo_indptr": ONE, "paged_kv_indptr": INDPTR, "paged_kv_indices": INDICES, "paged_kv_last_page_len": LAST,
        "num_qo_heads": 4, "num_kv_heads": 2, "head_dim_qk": 64, "page_size": 16, **FLOAT,
    },
    "BatchPrefillWithRaggedKVCacheWrapper": {
        "qo_indptr": ONE, "kv_indptr": ONE, "num_qo_heads": 4, "num_kv_heads": 2, "head_dim_qk": 64, **FLOAT,
    },
    "BatchMLAPagedAttentionWrapper": {
        "qo_indptr": ONE, "kv_indptr": INDPTR, "kv_indices": INDICES, "kv_len_arr": LAST, "num_heads": 4,
        "head_dim_ckv": 64, "head_dim_kpe": 16, "page_size": 16, "causal": True, "sm_scale": 0.1, **FLOAT,
    },
    "MultiLevelCascadeAttentionWrapper": {
        "qo_indptr_arr": [ONE], "paged_kv_indptr_arr": [INDPTR], "paged_kv_indices_arr": [INDICES],
        "paged_kv_last_page_len": [LAST], "num_qo_heads": 4, "num_kv_heads": 2, "head_dim": 64, "page_size": 16,
        **FLOAT,
    },
}  # fmt: skip
FUNCTIONS: dict[str, dict[str, Any]] = {
    "get_batch_indices_positions": {"append_indptr": ONE, "seq_lens": LAST, "nnz": 1},
    "get_seq_lens": {"kv_indptr": INDPTR, "kv_last_page_len": LAST, "page_size": 16},
    "rmsnorm": {"input": torch.ones(1, 64), "weight": torch.ones(64)},
    "gemma_rmsnorm": {"input": torch.ones(1, 64), "weight": torch.ones(64)},
    "append_paged_kv_cache": {
        "append_key": torch.ones(1, 2, 64), "append_value": torch.ones(1, 2, 64),
        "batch_indices": torch.zeros(1, dtype=torch.int32), "positions": torch.zeros(1, dtype=torch.int32),
        "paged_kv_cache": CACHE.to(torch.float8_e4m3fn), "kv_indices": INDICES, "kv_indptr": INDPTR,
        "kv_last_page_len": LAST,
    },
    "sample": {"logits": torch.zeros(1, 8), "uniform": torch.full((1,), 0.5)},
    "AttentionKind": {"num_qo_heads": 4, "num_kv_heads": 2, "head_dim": 64, "page_size": 16, "dtype": torch.float32},
    "LatentKind": {"num_heads": 4, "head_dim_ckv": 64, "head_dim_kpe": 16, "page_size": 16, "dtype": torch.float32},
    "cascade_gains": {
        "prefix_length": 10, "suffix_lengths": [1, 2], "group": 2, "kv_heads": 2, "head_dim": 64,
        "multiprocessors": 132,
    },
}  # fmt: skip


def workspace() -> torch.Tensor:
    return torch.empty(1 << 20, dtype=torch.uint8)


def made(name: str) -> Any:
    """Returns a wrapper that has a plan."""
    kind = getattr(quire_kernels, name)
    wrapper = kind(1, workspace()) if "Cascade" in name else kind(workspace())
    wrapper.plan(**WRAPPERS[name])
    return wrapper


def run(name: str, **values: Any) -> Any:
    """Plans a wrapper, and runs it once."""
    q = torch.zeros(1, 4, 64)
    tensors = (q, torch.zeros(1, 2, 64), torch.zeros(1, 2, 64)) if "Ragged" in name else (q, CACHE)
    return made(name).run(*tensors, **values)


def every_call() -> dict[str, tuple[Callable[..., Any], Callable[..., Any], dict[str, Any]]]:
    """Returns for each public callable the owner of its signature, a function that calls it, and its arguments."""
    found: dict[str, tuple[Callable[..., Any], Callable[..., Any], dict[str, Any]]] = {}
    for module in (quire_kernels, extra):
        for name in module.__all__:
            item = getattr(module, name)
            if name in WRAPPERS:
                plan = functools.partial(lambda name, **values: made(name).plan(**values), name)
                found[f"{name}.plan"] = (item.plan, plan, WRAPPERS[name])
                found[f"{name}.run"] = (item.run, functools.partial(run, name), {})
                found[name] = (item, functools.partial(item, float_workspace_buffer=workspace()), {})
            else:
                found[name] = (item, item, FUNCTIONS.get(name, {}))
    return found


CALLS = every_call()


def numbers_of(function: Callable[..., Any]) -> dict[str, bool]:
    """Returns the numeric parameters of a function, and whether each is an integer."""
    found = {}
    for parameter in inspect.signature(function).parameters.values():
        words = set(str(parameter.annotation).split(" "))
        if words & {"int", "float", "Scale"} and parameter.name not in WITHOUT_EFFECT:
            found[parameter.name] = "int" in words
    return found


NUMBERS = [(call, name, whole) for call, (owner, *_) in CALLS.items() for name, whole in numbers_of(owner).items()]


def test_the_numbers_of_every_kind_of_callable_are_looked_at() -> None:
    assert len(NUMBERS) >= 70
    assert {call.partition(".")[0] for call, *_ in NUMBERS} >= {*WRAPPERS, *FUNCTIONS}
    assert all({**PREFILL_PLAN, **RAGGED_PLAN}.get(name, HINT) is HINT for name in WITHOUT_EFFECT)


@pytest.mark.parametrize(("call", "name", "is_whole"), NUMBERS)
def test_a_number_that_a_kernel_does_not_take_is_refused_by_its_name(call: str, name: str, is_whole: bool) -> None:
    _, function, given = CALLS[call]
    values = [*(NO_INTEGERS if is_whole else NO_NUMBERS)]
    if is_whole:
        values.append(LOWEST.get(name, 1) - 1)
    values += [-1.0] if name in NOT_NEGATIVE else []
    values += [0.0, -1.0] if f"{call} {name}" in POSITIVE else []
    for value in values:
        with pytest.raises((TypeError, ValueError)) as raised:
            function(**{**given, name: value})
        assert re.match(f"{name} must be ", str(raised.value)), (value, raised.value)


@pytest.mark.parametrize(
    ("call", "name", "is_whole"), [each for each in NUMBERS if each[0] in FUNCTIONS or ".plan" in each[0]]
)
def test_a_number_of_numpy_is_a_number(call: str, name: str, is_whole: bool) -> None:
    _, function, given = CALLS[call]
    usual = given.get(name)
    if usual is None:
        usual = LOWEST.get(name, 64) if is_whole else 1.0
    function(**{**given, name: np.int64(usual) if is_whole else np.float32(usual)})


def test_sizes_of_numpy_give_what_integers_give() -> None:
    q, cache = torch.randn(1, 4, 64), torch.randn(2, 2, 16, 2, 64)
    given, found = WRAPPERS["BatchDecodeWithPagedKVCacheWrapper"], []
    for make in (int, np.int64):
        wrapper = quire_kernels.BatchDecodeWithPagedKVCacheWrapper(workspace())
        sizes = {name: make(given[name]) for name in ("num_qo_heads", "num_kv_heads", "head_dim", "page_size")}
        wrapper.plan(**{**given, **sizes, "window_left": make(1)})
        found.append(wrapper.run(q, cache))
    assert torch.equal(*found)
