"""The number of planted faults per module: removing a fault, or adding a kernel without faults, fails here."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import quire_kernels

from tests.worker.kernels import test_planted_faults_attention as attention
from tests.worker.kernels import test_planted_faults_cache as cache
from tests.worker.kernels import test_planted_faults_latent as latent

FAULTS = [
    *(fault for fault, _ in attention.FAULTS),
    *(fault for _, fault in (*cache.FAULTS, *latent.FAULTS)),
]
COUNT = {  # Number of faults per module. Update the number with each added or removed fault.
    "append_paged_kv_cache": 8,
    "append_slots": 10,
    "append_token": 8,
    "cascade": 10,
    "copy_blocks": 5,
    "decode_paged": 6,
    "fp8": 7,
    "gated_activation": 4,
    "merge_splits": 3,
    "merge_states": 12,
    "mla_paged": 16,
    "pack_mask": 3,
    "paged_cache": 3,
    "prefill_attention": 7,
    "prefill_rows": 8,
    "rms_norm": 4,
    "rotate_append": 10,
    "sampling": 10,
    "swap_blocks": 3,
    "tile": 21,
    "work_units": 5,
}


def test_no_fault_is_dropped() -> None:
    assert Counter(fault.module for fault in FAULTS) == COUNT
    assert sum(COUNT.values()) >= 161


def test_every_fault_is_another() -> None:
    assert len({(fault.module, fault.title) for fault in FAULTS}) == len(FAULTS)
    assert len({(fault.module, fault.before, fault.after, fault.through) for fault in FAULTS}) == len(FAULTS)


def test_every_kernel_has_one() -> None:
    (folder,) = quire_kernels.__path__
    kernels = {path.stem for path in Path(folder).rglob("*.py") if "\n@triton.jit" in path.read_text(encoding="utf-8")}
    assert kernels <= COUNT.keys() | {"block_buffers"}  # `block_buffers` only casts a number to a pointer
