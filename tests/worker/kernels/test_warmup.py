"""Warming up runs every combination once, reports its progress, and leaves nothing to compile."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import triton
from quire_kernels.compilation.kinds import AttentionKind
from quire_kernels.compilation.shipped import SHIPPED
from quire_kernels.compilation.warmup import count_compilations, warmup
from quire_kernels.shared.fp8 import E4M3
from quire_kernels.shared.launch import is_interpreted
from quire_kernels.shared.tile import attend_keys

from tests.worker.test_warm_up import launches

# `warmup` does not launch these kernels. The worker warms up the slot append and the kernels between products itself.
# Gluon kernels need Hopper. The docstring of `warmup` names the other exceptions.
NOT_COVERED = {
    "append_slots_kernel",
    "gated_activation_kernel",
    "merge_states_kernel",
    "mla_hopper_kernel",
    "prefill_hopper_kernel",
    "rms_norm_kernel",
    "rotate_append_kernel",
}
KINDS = [
    AttentionKind(4, 2, 64, 16, torch.float32),
    AttentionKind(4, 2, 64, 16, torch.float16, E4M3, window_left=7, has_sinks=True, has_scales=True, kv_layout="HND"),
]


@pytest.fixture(autouse=True)
def _small_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire_kernels.compilation.warmup.WORKSPACE_BYTES", 8 << 20)


def test_progress_counts_the_steps(device: torch.device) -> None:
    seen: list[tuple[int, int, str]] = []
    warmup([*KINDS, KINDS[0]], device, progress=lambda *step: seen.append(step))
    assert [done for done, _, _ in seen] == list(range(11))
    assert {total for _, total, _ in seen} == {10}
    assert seen[-1] == (10, 10, "done")


def test_users_of_the_wrappers_compile_nothing_after_warming_up() -> None:
    found = launches("tests.worker.kernels.wrapper_launches")
    kernels = {key.split()[0] for key in found["warmed"]}
    assert kernels == {configuration.kernel.__name__ for configuration in SHIPPED} - NOT_COVERED
    assert found["later"] == []


@pytest.mark.parametrize(("arguments", "kernel"), [(["[8, 40]"], "prefill_kernel"), (["", "append"], "append_kernel")])
def test_what_warming_up_leaves_out_would_be_noticed(arguments: list[str], kernel: str) -> None:
    found = launches("tests.worker.kernels.wrapper_launches", *arguments)
    assert kernel in {key.split()[0] for key in found["later"]}


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


@pytest.mark.parametrize(
    ("argument", "change"),
    [
        ("calls", {"calls": ("decode", "encode")}),
        ("custom_mask", {"custom_mask": "bits"}),
        ("window_left", {"calls": ("cascade",), "window_left": 3}),
    ],
)
def test_a_kind_that_cannot_be_called_is_refused_by_name(
    argument: str, change: dict[str, Any], device: torch.device
) -> None:
    with pytest.raises(ValueError, match=rf"^{argument}"):
        warmup([replace(KINDS[0], **change)], device)


def test_these_tests_run_interpreted_where_there_is_no_gpu(device: torch.device) -> None:
    assert is_interpreted(attend_keys) == (device.type == "cpu")
