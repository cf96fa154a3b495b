"""Speed of attention compared with the chip's limits, for the cases with goals, the most important first.

Each row of a case has Quire's kernel and SDPA on dense keys. Where a kernel for Hopper chips replaced an older one, the
row has the older one too ("triton"). Further rows compare fp8 pages with bfloat16 pages (`fp8`). Without a GPU, tiny
cases run in Triton's interpreter, and their times mean nothing.
"""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # Must be set before the first kernel is imported.

from kernel_sides import gpu
from kernel_sides.gpu_cases import SHAPES, Case, Grouped, Latent

from proof_sides import fp8
from proof_sides.rows import left_s, note

ROUNDS = 20
LLAMA, QWEN3, MLA = SHAPES["llama"], SHAPES["qwen3"], SHAPES["mla"]
CASES: tuple[Case, ...] = (
    Case("prefill", LLAMA, 4, 4096, 16),
    Case("prefill", LLAMA, 16, 1024, 16),
    Case("prefill", LLAMA, 1, 8192, 64),
    Case("decode", MLA, 32, 8192, 64),
    Case("decode", LLAMA, 1, 8192, 16),
    Case("decode", LLAMA, 32, 8192, 16),
    Case("decode", LLAMA, 1, 65_536, 16),
    Case("decode", MLA, 256, 8192, 16),
    Case("prefill", QWEN3, 4, 4096, 16),
    Case("prefill", LLAMA, 16, 1024, 64),
    Case("decode", MLA, 1, 8192, 64),
    Case("decode", LLAMA, 256, 8192, 16),
    Case("decode", LLAMA, 1, 1024, 16),
    Case("decode", LLAMA, 32, 1024, 16),
    Case("decode", QWEN3, 32, 8192, 16),
    Case("prefill", LLAMA, 1, 32_768, 16),
    Case("decode", MLA, 256, 1024, 16),
)
GOALS, FP8_S = 7, 12.0  # number of cases with goals; seconds for the fp8 rows, most of which compiling takes
TINY_SHAPE = Grouped("heads", 4, 2, 32)
TINY = (
    Case("prefill", TINY_SHAPE, 1, 40, 16),
    Case("decode", TINY_SHAPE, 2, 40, 16),
    Case("decode", Latent("latent", 16, 32, 16), 2, 40, 16),
)


def main() -> None:
    """Writes a row for each case."""
    if torch.cuda.is_available():
        bench, cases, without = gpu.cuda_bench(ROUNDS), CASES, ["flex", "torch", "vllm"]
    else:
        device = torch.device("cpu")
        bench = gpu.Bench(device, torch.float32, _launched, lambda: None, 1e12, 1e9, 1e12, 1)
        cases, without = TINY, ["flex", "vllm"]
    for case in cases[:GOALS]:
        write_case(case, bench, without)
    write_fp8(bench)
    for case in cases[GOALS:]:
        write_case(case, bench, without)


def write_case(case: Case, bench: gpu.Bench, without: list[str]) -> None:
    """Writes the row of a case; without time, the row says so."""
    budget_s = max(0.0, left_s() - 5)
    for row in gpu.measure_all([case], bench, operations_max=1e15, budget_s=budget_s, without=without, progress=print):
        note(row)


def write_fp8(bench: gpu.Bench) -> None:
    """Writes the rows of decode with an fp8 cache, if at least `FP8_S` are left."""
    if left_s() < FP8_S:
        return
    is_small = bench.device.type == "cpu"
    shape, batches, tokens = (TINY_SHAPE, (2,), 40) if is_small else (LLAMA, (32, 1), 8192)
    assert isinstance(shape, Grouped)
    for row in fp8.rows(shape, batches, tokens, bench):
        note(row)


def _launched(side: gpu.Side) -> float:
    side()
    return 1.0


if __name__ == "__main__":
    main()
