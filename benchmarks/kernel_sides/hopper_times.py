"""Times prefill on Hopper for several schedules: tiles in the ring, and whether the groups of warps take turns.

    python -m kernel_sides.hopper_times           a row for each schedule and batch, as JSON; in the folder `benchmarks`

The constants of `prefill_hopper` are what this found best. Each schedule takes 3 s to compile.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch
from quire_kernels.ops import prefill_hopper

from kernel_sides.hopper_checks import Batch, Shape

ROUNDS = 20
HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
SCHEDULES = ((2, False), (3, False), (3, True), (2, True))  # tiles in the ring, groups take turns
BATCHES = ((16, 1024), (4, 4096), (1, 8192))  # prompts, tokens of each


def seconds_of(call: Callable[[], Any]) -> float:
    """Returns the median time of a call on the device."""
    call()
    times = []
    for _ in range(ROUNDS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times)


def main() -> int:
    """Prints a row for the speed of a matrix product, and one for each schedule, page size and batch."""
    device = torch.device("cuda")
    side = 8192
    left, right = (torch.randn(side, side, device=device, dtype=torch.bfloat16) for _ in range(2))
    product = 2 * side**3 / seconds_of(lambda: left @ right)
    print(json.dumps({"device": torch.cuda.get_device_name(), "product_tflop_per_s": round(product / 1e12, 1)}))
    for page_size in (16, 64):
        batches = [
            Batch(Shape("", ((length, length),) * count, HEADS, KV_HEADS, HEAD_DIM, page_size), device)
            for count, length in BATCHES
        ]
        for stages, ordered in SCHEDULES:
            prefill_hopper.STAGES, prefill_hopper.ORDERED = stages, ordered
            for (count, length), batch in zip(BATCHES, batches, strict=True):
                assert batch.on_hopper
                pairs = count * length * (length + 1) // 2
                seconds = seconds_of(batch.run)
                speed = 4 * HEADS * HEAD_DIM * pairs / seconds
                row = {"stages": stages, "ordered": ordered, "page_size": page_size, "prompts": count, "tokens": length}
                row |= {"ms": round(seconds * 1e3, 4), "tflop_per_s": round(speed / 1e12, 1)}
                print(json.dumps(row | {"share_product": round(speed / product, 3)}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
