"""Compares the latent decode kernels for Hopper that QUIRE_LATENT_VARIANT chooses: right or not, and where time goes.

    python -m kernel_sides.latent_variant_times [FILE]    one variant, on a GPU of capability 9, once FILE is there

Kernels are compiled before the turn, which is over after `TURN_S` in any case.
Times are medians of 20 with cold caches, as `gpu` measures: of the whole (`run`), and of its kernel and merge apart.
"""

from __future__ import annotations

import itertools
import os
import signal
import statistics
import sys
import time
from pathlib import Path

import torch
from quire_kernels.ops import latent_variants
from quire_kernels.ops.merge_splits import merge_splits
from quire_kernels.ops.mla_paged import mla_paged
from quire_kernels.shared.mla_work import divide_mla
from triton.runtime.jit import JITFunction

from kernel_sides import hopper_decode_checks as checks
from kernel_sides.gpu import FLUSH_BYTES, MATRIX_SIZE
from kernel_sides.gpu_cases import SHAPES, Case
from kernel_sides.gpu_scenes import LATENT_SCALE, LatentScene

ROUNDS, TURN_S = 20, 10
CHECKED = (
    ([0, 1, 63, 64, 65, 4000, 129, 16, 17], 80, 16),
    ([number * 37 % 400 for number in range(300)], 128, 16),
    ([1024] * 150, 128, 64),
    ([8192, 5000], 128, 64),
)
MLA = SHAPES["mla"]
CASES = ((32, 8192, 64), (256, 1024, 16), (32, 8192, 16), (66, 8192, 16), (66, 1024, 16), (32, 1024, 16), (1, 8192, 64),
         (256, 8192, 16))  # fmt: skip


def main() -> None:
    """Prints a line for each shape."""
    name, begun = os.environ.get(latent_variants.VARIANT, "") or "today", time.monotonic()
    try:
        compile_all()
    except Exception as error:  # they are compiled at their first launch then
        print(name, f"{type(error).__name__}: {error}", flush=True)
    print(name, f"compiled after {time.monotonic() - begun:.1f} s", flush=True)
    while len(sys.argv) > 1 and not Path(sys.argv[1]).exists():
        time.sleep(0.02)
    signal.alarm(TURN_S)
    begun = time.monotonic()
    checks.LATENT = CHECKED
    for row in checks.latent_checks():
        print(name, row, f"{time.monotonic() - begun:.1f} s", flush=True)
    other = torch.zeros(FLUSH_BYTES // 4, device="cuda")
    a, b = torch.randn(2, MATRIX_SIZE, MATRIX_SIZE, device="cuda", dtype=torch.bfloat16)
    product_ms = _medians(other, [lambda: a @ b])[0]
    product = 2 * MATRIX_SIZE**3 / product_ms / 1e9
    for batch, context, page_size in CASES:
        case = Case("decode", MLA, batch, context, page_size)
        scene = LatentScene(case, MLA, torch.device("cuda"), torch.bfloat16)
        run = scene.quire()
        sizes = [MLA.latent, MLA.positional]
        query, pages = scene.query.split(sizes, dim=2), scene.pool.pages.split(sizes, dim=2)
        parts = {"q_nope": query[0], "q_pe": query[1], "ckv": pages[0], "kpe": pages[1]}
        indices = tuple(tensor.to("cuda") for tensor in (scene.pool.starts, scene.pool.indptr, scene.pool.indices))
        lengths = scene.pool.lengths.to("cuda")
        out = torch.empty_like(query[0], memory_format=torch.contiguous_format)
        lse = torch.empty(out.shape[:2], device="cuda")

        def divide(given=None, starts=indices[0], lengths=lengths, size=page_size):  # type: ignore[no-untyped-def]
            return divide_mla(
                starts, lengths, token_count=len(lengths), split_keys=True, heads=128, ckv_dim=512, element_bytes=2,
                page_size=size, out=given,
            )  # fmt: skip

        work = divide()

        def attend(parts=parts, indices=indices, work=work, out=out, lse=lse):  # type: ignore[no-untyped-def]
            latent_variants.launch_hopper(parts, indices, work, out, lse, LATENT_SCALE)

        def merge(work=work, out=out, lse=lse):  # type: ignore[no-untyped-def]
            merge_splits(work.partial_out, work.partial_lse, work.work, out, lse)

        run_ms = _medians(other, [run])[0]
        main_ms, merge_ms = _medians(other, [attend, merge])
        divide_ms = _medians(other, [lambda again=divide, work=work: again(work)])[0]
        rate = case.operations / run_ms / 1e9
        print(
            f"{name:12} {batch:3} x {context:5} pages {page_size:2}: {run_ms * 1e3:7.1f} us, {rate:5.1f} TFLOP/s, "
            f"{rate / product:.3f} of a product ({product:.0f}); kernel {main_ms * 1e3:7.1f} us, merge "
            f"{merge_ms * 1e3:5.1f} us, division {divide_ms * 1e3:5.1f} us; {time.monotonic() - begun:.1f} s",
            flush=True,
        )


def compile_all() -> None:
    """Compiles what will be launched, and launches nothing."""
    launch = JITFunction.run
    JITFunction.run = lambda self, *given, grid, warmup, **named: launch(  # type: ignore[method-assign,misc]
        self, *given, grid=grid, warmup=True, **named
    )
    try:
        for heads, page_size in ((128, 16), (128, 64), (80, 16)):
            pages = torch.zeros(4, page_size, 576, device="cuda", dtype=torch.bfloat16).split([512, 64], dim=2)
            query = torch.zeros(2, heads, 576, device="cuda", dtype=torch.bfloat16).split([512, 64], dim=2)
            indptr = torch.arange(3, device="cuda", dtype=torch.int32)
            lengths = torch.ones(2, device="cuda", dtype=torch.int32)
            work = divide_mla(
                indptr, lengths, token_count=2, split_keys=True, heads=heads, ckv_dim=512, element_bytes=2,
                page_size=page_size,
            )  # fmt: skip
            mla_paged(*query, *pages, indptr, indptr, lengths, lengths, work, sm_scale=0.1, causal=True)
    finally:
        JITFunction.run = launch  # type: ignore[method-assign]
    torch.cuda.synchronize()


def _medians(other: torch.Tensor, sides: list) -> list[float]:  # type: ignore[type-arg]
    """Returns the milliseconds of sides that are launched one after another, with cold caches before the first."""
    times: list[list[float]] = []
    for _ in range(ROUNDS + 1):
        events = [torch.cuda.Event(enable_timing=True) for _ in range(len(sides) + 1)]
        other.sum()
        events[0].record()
        for side, event in zip(sides, events[1:], strict=True):
            side()
            event.record()
        events[-1].synchronize()
        times.append([before.elapsed_time(after) for before, after in itertools.pairwise(events)])
    return [statistics.median(column) for column in zip(*times[1:], strict=True)]


if __name__ == "__main__":
    main()
