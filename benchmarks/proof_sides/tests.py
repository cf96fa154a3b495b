"""Runs the tests of `make test-gpu`, the newest first, until the time is over. Each test gets a row."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from proof_sides.rows import IS_DRY

ROOT = Path(__file__).resolve().parents[2]
JOBS = 12  # number of parallel tests on 16 cores; each test takes some hundred MiB of GPU memory
KERNELS = "tests/worker/kernels"
FIRST = (
    f"{KERNELS}/test_decode_graphs.py", f"{KERNELS}/test_gpu_rewrites.py", f"{KERNELS}/test_triton_path.py",
    f"{KERNELS}/test_sampling.py", f"{KERNELS}/test_mla_paged.py", f"{KERNELS}/test_prefill_paged.py",
    f"{KERNELS}/test_decode_paged.py", f"{KERNELS}/test_attention_wrappers.py",
)  # fmt: skip
ALL = ("tests/worker/test_attention.py", "tests/worker/test_formats.py", "tests/worker/test_on_gpu.py", KERNELS)
MARKS = "not compose and not peer and not soak"


def run_tests(paths: Sequence[str], *, jobs: int, marks: str) -> int:
    """Runs tests in this process, or in several (`jobs`); returns pytest's exit code."""
    given = [*paths, "-p", "proof_sides.pytest_rows", "-p", "no:cacheprovider", "-m", marks, "--tb=short", "-q"]
    if jobs:
        given += ["-n", str(jobs), "--dist", "load"]
    return int(pytest.main([*given, "--rootdir", str(ROOT)]))


def main() -> None:
    """Runs the tests that need a GPU."""
    if IS_DRY:
        sys.exit(run_tests([f"{KERNELS}/test_upload.py", f"{KERNELS}/test_work_units.py"], jobs=0, marks=MARKS))
    sys.exit(run_tests([*FIRST, *ALL], jobs=JOBS, marks=MARKS))


if __name__ == "__main__":
    main()
