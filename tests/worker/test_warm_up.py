"""Warming up launches every kernel that serving launches, so that serving compiles nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from quire.errors import UsageError
from quire_worker.execution import warm_up as warming
from quire_worker.execution.warm_up import LADDER, company_of, warm_up
from quire_worker.process.server import check_device, parse_arguments

from tests.worker.engine_harness import paged_model
from tests.worker.state_models import write_with_states
from tests.worker.tiny_models import write_tiny_llama, write_tiny_qwen3

ROOT = Path(__file__).resolve().parents[2]


def launches(module: str, *arguments: str) -> dict[str, list[str]]:
    """Runs a module in a process without Triton's interpreter, and returns its output."""
    command = [sys.executable, "-m", module, *arguments]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    path = os.pathsep.join(entry for entry in sys.path if entry)
    done = subprocess.run(
        command, cwd=ROOT, env={**environment, "PYTHONPATH": path}, capture_output=True, text=True, timeout=100,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, list[str]] = json.loads(done.stdout.splitlines()[-1])
    return found


def launches_of(folder: Path, *arguments: str) -> dict[str, list[str]]:
    """Returns the launches that `tests.worker.specialisations` prints."""
    return launches("tests.worker.specialisations", str(folder), *arguments)


@pytest.mark.parametrize(
    ("write", "shape", "dtype"),
    [
        (write_tiny_llama, {}, "float32"),
        (write_tiny_llama, {}, "bfloat16"),
        (write_tiny_qwen3, {"heads": 7, "kv_heads": 1}, "bfloat16"),
        (write_tiny_llama, {"heads": 32, "kv_heads": 1, "head_dim": 24}, "float32"),
    ],
    ids=["4/2 heads of 16", "4/2 heads of 16, bfloat16", "7/1 heads of 16, bfloat16", "32/1 heads of 24"],
)
def test_nothing_is_compiled_in_the_middle_of_serving(
    write: Any, shape: dict[str, int], dtype: str, tmp_path: Path
) -> None:
    pytest.importorskip("triton")
    found = launches_of(write(tmp_path / "model", **shape), dtype)
    kernels = {key.split()[0] for key in found["warmed"]}
    assert {"decode_paged_kernel", "prefill_kernel", "append_slots_kernel", "divide_work_kernel"} <= kernels
    assert {"copy_blocks_kernel", "sample_kernel"} <= kernels
    assert found["later"] == []


def test_a_warm_up_that_leaves_something_out_would_be_noticed(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    found = launches_of(write_tiny_llama(tmp_path / "model"), "bfloat16", "[2]")
    assert {key.split()[0] for key in found["later"]} >= {"prefill_kernel"}


def test_progress_names_every_step(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    seen: list[tuple[int, int, str]] = []
    warm_up(paged_model(write_tiny_llama(tmp_path / "model")), progress=lambda *step: seen.append(step))
    assert [done for done, _, _ in seen] == list(range(len(LADDER) + 4))
    assert seen[0][2] == "decode, one sequence"
    assert seen[-1] == (len(LADDER) + 3, len(LADDER) + 3, "done")


@pytest.mark.parametrize(("sequences", "company"), [(1, 3), (10, 9), (1_000, 64)])
def test_sequences_with_large_states_warm_up_in_pages_of_bounded_size(
    sequences: int, company: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = paged_model(write_with_states("Bamba", tmp_path / "model")).cache_spec
    monkeypatch.setattr(warming, "SCRATCH_BYTES", sequences * len(spec.groups) * spec.bytes_per_block)
    assert company_of(spec) == company


def test_a_gpu_is_asked_for_by_name_and_refused_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse_arguments(["--model", "m", "--device", "cuda"]).device == "cuda"
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(UsageError, match="--device cuda: torch finds no GPU"):
        check_device("cuda")
    check_device("cpu")
