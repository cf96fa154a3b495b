"""Warming up runs every combination once, says how far it is, and leaves nothing to compile."""

from __future__ import annotations

import pytest
import torch
import triton
from quire_worker.kernels.e4m3 import E4M3
from quire_worker.kernels.launch import is_interpreted
from quire_worker.kernels.tile import attend_keys
from quire_worker.kernels.warmup import AttentionKind, count_compilations, warmup

KINDS = [
    AttentionKind(4, 2, 64, 16, torch.float32),
    AttentionKind(4, 2, 64, 16, torch.float16, E4M3, window_left=7, has_sinks=True, has_scales=True, kv_layout="HND"),
]


@pytest.fixture(autouse=True)
def _small_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire_worker.kernels.warmup.WORKSPACE_BYTES", 8 << 20)


def test_progress_counts_the_steps(device: torch.device) -> None:
    seen: list[tuple[int, int, str]] = []
    warmup([*KINDS, KINDS[0]], device, progress=lambda *step: seen.append(step))
    assert [done for done, _, _ in seen] == list(range(9))
    assert {total for _, total, _ in seen} == {8}
    assert seen[-1] == (8, 8, "done")


def test_a_second_time_compiles_nothing(device: torch.device) -> None:
    warmup(KINDS, device)
    assert warmup(KINDS, device).count == 0


def test_compilations_are_counted_by_triton_and_other_hooks_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", lambda **arguments: calls.append("other"))
    with count_compilations() as found:
        triton.knobs.runtime.jit_post_compile_hook(fn=None, key="", repr="")
    assert (found.count, found.kernels, calls) == (1, ["kernel"], ["other"])
    triton.knobs.runtime.jit_post_compile_hook(fn=None)
    assert found.count == 1


def test_a_kind_that_makes_no_sense_is_refused(device: torch.device) -> None:
    with pytest.raises(ValueError, match=r"^num_qo_heads"):
        warmup([AttentionKind(5, 2, 64, 16, torch.float32)], device)


def test_these_tests_run_interpreted_where_there_is_no_gpu(device: torch.device) -> None:
    assert is_interpreted(attend_keys) == (device.type == "cpu")
