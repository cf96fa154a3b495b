"""Prefill on Hopper against float64: ragged batches on scattered pages, with NaN in all unused slots.

    python -m kernel_sides.hopper_checks          a row for each shape, as JSON; in the folder `benchmarks`

Without a GPU, the Triton kernel computes the same shapes in the interpreter, with shorter requests.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # Must be set before Triton is imported.

from quire_kernels.ops.prefill_attention import prefill_paged, prefill_paged_reference
from quire_kernels.ops.prefill_hopper import SWITCH, runs_on_hopper
from quire_kernels.shared.launch import Tiling, chip_of
from quire_kernels.shared.options import AttentionOptions
from quire_kernels.shared.paged_cache import unpack_paged_cache
from quire_kernels.shared.prefill_rows import Masking, divide_prefill, prefill_tiling
from quire_kernels.shared.reference import LSE_TOLERANCE, TOLERANCE

SHRUNK = 20  # divisor of all lengths if there is no GPU
CHECKED_COUNT = 6  # number of shapes that `prefill_checks` checks; the tests check every shape


@dataclass(frozen=True, slots=True)
class Shape:
    """A batch: each request's new tokens and all tokens, and heads, pages and options."""

    title: str
    lengths: tuple[tuple[int, int], ...]
    heads: int
    kv_heads: int
    head_dim: int = 128
    page_size: int = 16
    layout: str = "NHD"
    dtype: torch.dtype = torch.bfloat16
    window_left: int = -1
    soft_cap: float = 0.0
    has_sinks: bool = False
    causal: bool = True


PLAIN = ((1, 1), (17, 300), (640, 640), (1000, 1333))
SHAPES = (
    Shape("ratio 4, pages of 16", PLAIN, 32, 8),
    Shape("ratio 4, pages of 64, a long request", ((2000, 2500), (129, 129)), 8, 2, page_size=64),
    Shape("ratio 5, window of 200, pages of 16", PLAIN, 10, 2, window_left=200),
    Shape("ratio 7, soft cap and sinks, pages of 64", PLAIN, 14, 2, page_size=64, soft_cap=20.0, has_sinks=True),
    Shape("ratio 8, head dim 64, HND, float16", PLAIN, 16, 2, head_dim=64, layout="HND", dtype=torch.float16),
    Shape(
        "empty requests, more queries than keys, ratio 1",
        ((0, 0), (300, 300), (0, 77), (400, 150), (200, 0), (500, 1000)), 4, 4, page_size=64,
    ),
    Shape("ratio 4, window and soft cap, pages of 64", PLAIN, 8, 2, page_size=64, window_left=33, soft_cap=5.0),
    Shape("not causal, ratio 4", ((300, 900), (555, 100), (130, 128)), 8, 2, causal=False),
    Shape("not causal, window, HND, pages of 32", ((300, 900), (555, 700)), 8, 2, page_size=32, layout="HND",
          window_left=128, causal=False),
    Shape("pages of 8, ratio 3", PLAIN, 6, 2, page_size=8),
    Shape("pages of 128, float16, sinks", PLAIN, 8, 1, page_size=128, dtype=torch.float16, has_sinks=True),
    Shape("pages of 256, head dim 64, window", PLAIN, 12, 2, page_size=256, head_dim=64, window_left=500),
    Shape("many requests", tuple((97 + 31 * i % 211, 97 + 77 * i % 800) for i in range(40)), 32, 8, page_size=16),
    Shape("head dim 256, pages of 16", PLAIN, 8, 2, head_dim=256),
    Shape("head dim 256, pages of 64, window and sinks", PLAIN, 16, 2, head_dim=256, page_size=64, window_left=300,
          has_sinks=True),
)  # fmt: skip


class Batch:
    """The random tensors of a shape on a device, and their expected results."""

    def __init__(self, shape: Shape, device: torch.device, shrunk: int = 1) -> None:
        generator = torch.Generator().manual_seed(45)
        lengths = [(new // shrunk, kv // shrunk) for new, kv in shape.lengths]
        pages = [-(-kv // shape.page_size) for _, kv in lengths]
        page_count = sum(pages) + 3
        ids = torch.randperm(page_count, generator=generator)[: sum(pages)]
        kv = torch.randn(
            page_count, 2, shape.page_size, shape.kv_heads, shape.head_dim, generator=generator, dtype=torch.float32
        )
        used = torch.zeros(page_count, shape.page_size, dtype=torch.bool)
        first = 0
        for (_, length), count in zip(lengths, pages, strict=True):
            slots = torch.arange(count * shape.page_size).reshape(count, shape.page_size) < length
            used[ids[first : first + count]] = slots
            first += count
        kv = kv.masked_fill(~used[:, None, :, None, None], torch.nan).to(device=device, dtype=shape.dtype)
        if shape.layout == "HND":
            kv = kv.transpose(2, 3).contiguous()

        def index(values: list[int]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int32, device=device)

        self.shape = shape
        self.cache = unpack_paged_cache(kv, shape.layout)
        self.qo_indptr = index([0, *(new for new, _ in lengths)]).cumsum(0, dtype=torch.int32)
        self.table = (
            index([0, *pages]).cumsum(0, dtype=torch.int32),
            ids.to(device=device, dtype=torch.int32),
            index([(kv - 1) % shape.page_size + 1 if kv else 0 for _, kv in lengths]),
        )
        tokens = sum(new for new, _ in lengths)
        self.q = torch.randn(tokens, shape.heads, shape.head_dim, generator=generator).to(device, shape.dtype)
        sinks = torch.randn(shape.heads, generator=generator).to(device) if shape.has_sinks else None
        self.options = AttentionOptions(
            sm_scale=shape.head_dim**-0.5, logits_soft_cap=shape.soft_cap, window_left=shape.window_left, sinks=sinks
        )
        self.masking = Masking(causal=shape.causal)
        group = shape.heads // shape.kv_heads
        tiling: Tiling = prefill_tiling(
            chip_of(device), tokens * group // len(lengths), shape.head_dim, shape.head_dim, 2
        )
        self.division = divide_prefill(self.qo_indptr, token_count=tokens, group=group, tiling=tiling)

    @property
    def on_hopper(self) -> bool:
        """Returns whether the Hopper kernel computes this batch."""
        return runs_on_hopper(self.q, self.cache, self.options, self.masking, self.division)

    def run(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns out and lse from the kernel that the launcher chooses."""
        return prefill_paged(self.q, self.cache, self.qo_indptr, *self.table, self.options, self.masking, self.division)

    def expected(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns out and lse in float64."""
        return prefill_paged_reference(self.q, self.cache, self.qo_indptr, *self.table, self.options, self.masking)


def error_of(actual: torch.Tensor, expected: torch.Tensor, tolerance: float) -> tuple[float, bool]:
    """Returns the largest error, and whether all are within tolerance, absolute plus relative. NaN always fails."""
    actual = actual.double()
    same = actual == expected  # True also for equal infinities, because their difference is NaN.
    difference = torch.where(same, 0.0, (actual - expected).abs())
    within = difference <= tolerance + tolerance * expected.abs()
    largest = float(difference.nan_to_num(torch.inf, torch.inf).max()) if difference.numel() else 0.0
    return largest, bool((within | same).all())


def check(shape: Shape, device: torch.device, shrunk: int = 1, *, beside_triton: bool = False) -> dict[str, Any]:
    """Returns a row: the largest errors of the launcher's kernel and, with `beside_triton`, of the Triton kernel."""
    start = time.perf_counter()
    batch = Batch(shape, device, shrunk)
    expected = batch.expected()
    row: dict[str, Any] = {"shape": shape.title, "kernel": "hopper" if batch.on_hopper else "triton"}
    out, lse = batch.run()
    row["error_max"], out_right = error_of(out, expected[0], TOLERANCE[shape.dtype])
    row["lse_error_max"], lse_right = error_of(lse, expected[1], LSE_TOLERANCE)
    row["passed"] = out_right and lse_right
    if batch.on_hopper and beside_triton:
        before = os.environ.get(SWITCH)
        os.environ[SWITCH] = "0"
        try:
            row["triton_error_max"], _ = error_of(batch.run()[0], expected[0], TOLERANCE[shape.dtype])
        finally:
            os.environ.pop(SWITCH)
            if before is not None:
                os.environ[SWITCH] = before
    return row | {"seconds": round(time.perf_counter() - start, 2)}


def prefill_checks() -> Iterator[dict[str, Any]]:
    """Yields a row for each of six shapes: which kernel ran, its largest error, and whether it passed."""
    has_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if has_gpu else "cpu")
    for number, shape in enumerate(SHAPES[:CHECKED_COUNT]):  # few shapes: each compiles for seconds
        yield check(shape, device, 1 if has_gpu else SHRUNK, beside_triton=number == 0)


def main() -> int:
    """Prints the rows of all shapes; returns 1 if one is wrong."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    wrong = 0
    for shape in SHAPES:
        row = check(shape, device, 1 if device.type == "cuda" else SHRUNK, beside_triton=True)
        print(json.dumps(row), flush=True)
        wrong += not row["passed"]
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
