"""Times ways to divide and merge decode on a GPU, in turn: before, and after with several constants. Temporary.

    PYTHONPATH=worker_service:benchmarks:client python benchmarks/decode_sweep.py [seconds]
"""

from __future__ import annotations

import random
import statistics
import sys
import time

import torch
from decode_before import decode_paged as old_decode
from decode_before import decode_work as old_work
from quire_kernels.ops import decode_paged as new_decode
from quire_kernels.shared import decode_work as new_work
from quire_kernels.shared.launch import Tiling
from quire_kernels.shared.options import AttentionOptions
from quire_kernels.shared.paged_cache import PagedCache

random.seed(7)
HEADS, KV_HEADS, DIM, PAGE, ROUNDS = 32, 8, 128, 16, 15
SCENES = {
    "32 x 580": [580] * 32,
    "128 x 580": [580] * 128,
    "1 x 8k": [8192],
    "1 x 64k": [65536],
    "32 x 8k": [8192] * 32,
    "1 x 580": [580],
    "8 x 1k": [1024] * 8,
    "24 x 1k": [1024] * 24,
    "48 x 1k": [1024] * 48,
    "32 of 100..1060": [random.randint(100, 1060) for _ in range(32)],
    "128 of 100..1060": [random.randint(100, 1060) for _ in range(128)],
    "16k + 31 x 580": [16384] + [580] * 31,
    "4 x 8k": [8192] * 4,
    "256 x 1k": [1024] * 256,
}
# name: division, WAVES, TILES_MIN, kernel, tiling (None: as chosen)
VARIANTS = {
    "before": (old_work, 4, 4, "launch", None),
    "old division, in one": (None, 4, 4, "one", None),
    "waves 2": (new_work, 2, 4, "one", None),
    "waves 2, launch": (new_work, 2, 4, "launch", None),
    "waves 1": (new_work, 1, 4, "one", None),
    "waves 3": (new_work, 3, 4, "one", None),
    "waves 4": (new_work, 4, 4, "one", None),
    "waves 2, tiles 8": (new_work, 2, 8, "one", None),
    "waves 4, tiles 2": (new_work, 4, 2, "one", None),
    "waves 2, stages 3": (new_work, 2, 4, "one", Tiling(16, 64, 4, 3)),
    "waves 3, stages 3": (new_work, 3, 4, "one", Tiling(16, 64, 4, 3)),
    "waves 4, block 32": (new_work, 4, 4, "one", Tiling(16, 32, 4, 4)),
}


def table_of(lengths, device):
    counts = [-(-length // PAGE) for length in lengths]
    indptr = torch.tensor([0, *counts]).cumsum(0)
    last = torch.tensor([length - (count - 1) * PAGE for length, count in zip(lengths, counts)])
    return [t.to(device, torch.int32) for t in (indptr, torch.randperm(sum(counts)), last)]


def division_of(variant, indptr, last):
    module, waves, tiles, _, tiling = variant
    sizes = {
        "page_size": PAGE, "query_heads": HEADS, "kv_heads": KV_HEADS, "head_dim": DIM, "v_head_dim": DIM,
        "element_bytes": 2,
    }  # fmt: skip
    if module is None:  # the old division for the new kernel
        old, new = old_work.divide_decode(indptr, last, **sizes), division_of(VARIANTS["waves 4"], indptr, last)
        return new_work.DecodeWork(old.work, old.tiling, old.partial_out, old.partial_lse, new.arrivals, -1)
    was = module.WAVES, module.TILES_MIN, module.decode_tiling
    module.WAVES, module.TILES_MIN = waves, tiles
    if tiling is not None:
        module.decode_tiling = lambda *_, **__: tiling
    try:
        return module.divide_decode(indptr, last, **sizes)
    finally:
        module.WAVES, module.TILES_MIN, module.decode_tiling = was


def main() -> None:
    has_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if has_gpu else "cpu")
    ends = time.monotonic() + float(sys.argv[1] if len(sys.argv) > 1 else 100)
    scenes = SCENES if has_gpu else {"3 requests": [700, 5, 300]}
    flush = torch.zeros((256 << 20) // 4 if has_gpu else 4, device=device)
    options = AttentionOptions(DIM**-0.5)
    for name, lengths in scenes.items():
        indptr, indices, last = table_of(lengths, device)
        pool = torch.randn(len(indices), PAGE, KV_HEADS, 2, DIM, device=device, dtype=torch.bfloat16)
        cache = PagedCache(pool[..., 0, :], pool[..., 1, :])
        q = torch.randn(len(lengths), HEADS, DIM, device=device, dtype=torch.bfloat16)
        calls, results = {}, {}
        for label, variant in VARIANTS.items():
            if time.monotonic() > ends:
                break
            division = division_of(variant, indptr, last)
            module = old_decode if variant[3] == "launch" else new_decode
            out, lse = torch.empty_like(q), torch.empty(q.shape[:2], device=device)

            def call(module=module, division=division, out=out, lse=lse):
                return module.decode_paged(q, cache, indptr, indices, last, options, division, out=out, lse=lse)

            try:
                results[label] = tuple(part.double() for part in call())
            except Exception as error:  # a variant that does not fit the chip
                print(f"{name:18} {label:22} {type(error).__name__}: {str(error)[:80]}", flush=True)
                continue
            calls[label] = call, int(division.work.indptr[-1]), division.work.capacity
        base = results["before"]
        times = {label: [] for label in calls}
        captured = {}
        if has_gpu:  # from graphs, so that the host's time does not count
            for label, (call, _, _) in calls.items():
                torch.cuda.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    call()
                captured[label] = graph
            for _ in range(ROUNDS):
                for label in calls:
                    flush.sum()
                    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                    start.record()
                    captured[label].replay()
                    stop.record()
                    stop.synchronize()
                    times[label].append(start.elapsed_time(stop) * 1e3)
        copy_us = sum(lengths) * 2 * KV_HEADS * DIM * 2 / 2.95e6
        for label, (_, units, capacity) in calls.items():
            error = max(float((a - b).abs().nan_to_num(9e9).max()) for a, b in zip(results[label], base))
            us = statistics.median(times[label]) if times[label] else 0
            least = min(times[label], default=0)
            print(
                f"{name:18} {label:22} units {units:4}/{capacity:4}  us {us:7.1f}  least {least:7.1f}"
                f"  bytes {copy_us:6.1f}  of a copy {copy_us / us if us else 0:5.3f}  from before {error:.1e}",
                flush=True,
            )


if __name__ == "__main__":
    main()
