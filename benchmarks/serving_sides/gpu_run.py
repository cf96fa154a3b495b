"""Serving measured on a GPU, from a checkpoint to rows: `serving.py --device cuda`, a part of `scripts/gpu_proof.py`.

    1. the chip        a copy and a matrix product
    2. the checkpoint  random weights, drawn on the GPU and written to memory
    3. Quire           allocator, worker and client, as `on_gpu` says
    4. transformers    each side alone on the GPU, on the workloads of Quire's rows

Without a GPU the demo model is served on the CPU instead: no figure of that means anything, but every step is taken.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from serving_sides.ceiling import Bounds, Chip, chip
from serving_sides.gpu_goals import TRANSFORMERS
from serving_sides.models import DEMO, LAST_FILE, draw_model
from serving_sides.on_gpu import ALL, TINY, Measurement, measure, memory_row
from serving_sides.probed_stack import ProbedStack
from serving_sides.process import Side
from serving_sides.workload import KINDS, Workload

Row = dict[str, Any]
MODEL = "llama-8b"
IN_MEMORY = Path("/dev/shm")
UTILIZATION, BLOCK_TOKENS = 0.9, 16
ON_GPU = (
    "--device", "cuda", "--dtype", "bfloat16", "--gpu-memory-utilization", str(UTILIZATION),
    "--block-size", str(BLOCK_TOKENS),
)  # fmt: skip
ON_CPU = ("--blocks", "512")
TRANSFORMERS_ORDER = {32: 0, 1: 1, 128: 2}  # which workload each of their sides gets first, by requests
SIDE_S = 75.0  # that one of transformers' sides may take
VOCABULARY = 256  # of their prompts
PLAN_S = 8.0  # that `quire plan` may take
START_S = 110.0  # that a side may take to serve


def rows(
    *,
    has_gpu: bool,
    sides: Collection[str],
    left_s: Callable[[], float],
    logs: Path,
    checkpoint: Path | None = None,
    wanted: Measurement | None = None,
    worker_arguments: Sequence[str] = (),
) -> Iterator[Row]:
    """Yields rows as they are measured; a side that fails is a row that says so.

    Args:
        has_gpu: whether to use it; else the CPU, on tiny workloads.
        sides: of "quire", "generate" and "generate_batch".
        left_s: tells how many seconds are left; what there is no time for is left out.
        logs: folder of the servers' logs; exists.
        checkpoint: of `MODEL`; None or not there: it is made first.
        wanted: what to measure, if not what goes with the device.
        worker_arguments: further command line of the worker.
    """
    wanted = wanted or (ALL if has_gpu else TINY)
    speed = chip() if has_gpu else Chip(1e10, 1e10)
    yield {"measured": "chip", "copied_tb_per_s": speed.copied_bytes_per_s / 1e12,
           "multiplied_tflop_per_s": speed.multiplied_per_s / 1e12}  # fmt: skip
    with tempfile.TemporaryDirectory(dir=IN_MEMORY if IN_MEMORY.is_dir() else None) as made:
        started = time.monotonic()
        model = checkpoint if checkpoint is not None and (checkpoint / LAST_FILE).is_file() else None
        if model is None:
            model = draw_model(MODEL, Path(made), "cuda") if has_gpu else DEMO
        _free()
        yield {"measured": "checkpoint", "seconds": round(time.monotonic() - started, 1)}
        if "quire" in sides:
            try:
                arguments = [*(ON_GPU if has_gpu else ON_CPU), *worker_arguments]
                bounds = Bounds(model, speed, element_bytes=2)
                stack = ProbedStack(model, logs, arguments, start_timeout_s=min(START_S, left_s()))
                with contextlib.closing(stack):
                    others_s = SIDE_S * len(set(sides) & set(TRANSFORMERS))
                    yield from measure(stack, wanted, bounds, lambda: left_s() - PLAN_S, others_s=others_s)
                    total_bytes = _memory_bytes() if has_gpu else 2 << 30
                    yield memory_row(stack, model, total_bytes, UTILIZATION, BLOCK_TOKENS)
            except Exception as error:  # the other sides' rows are worth having
                yield {"measured": "quire", "passed": False, "why": f"{type(error).__name__}: {error}"[:2000]}
        for side in TRANSFORMERS:
            if side in sides and left_s() > 20:
                yield from _transformers_rows(side, model, wanted, left_s, logs, has_gpu=has_gpu)


def _free() -> None:
    """Gives back what this process has of the GPU, so that the worker finds it free."""
    import gc

    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _memory_bytes() -> int:
    import torch

    return int(torch.cuda.mem_get_info()[1])


def _transformers_rows(
    side: str, model: Path, wanted: Measurement, left_s: Callable[[], float], logs: Path, *, has_gpu: bool
) -> Iterator[Row]:
    """Yields a row for each of the first workloads of `wanted.decode` that `side` ends in time."""
    device, dtype = ("cuda", "bfloat16") if has_gpu else ("cpu", "float32")
    command = [sys.executable, "-m", "serving_sides.transformers_side", str(model), dtype, device, side]
    process: Side | None = None
    ending = contextlib.ExitStack()
    try:
        with ending:
            started = time.monotonic()
            process = Side(
                command,
                log=logs / f"{side}.log",
                on_start=lambda made: _kill_after(ending, made, min(SIDE_S, left_s())),
            )
            start_s = time.monotonic() - started
            for count, prompt, output in sorted(wanted.decode[:3], key=lambda each: TRANSFORMERS_ORDER.get(each[0], 3)):
                workload = Workload(KINDS[0], count, prompt, output)
                # What is compiled and captured goes by lengths in one case, and not in the other, which is the slower.
                warming = workload if side == "generate" else replace(workload, output_tokens=8)
                process.generate(warming.draw(-1, VOCABULARY))
                answer = process.generate(workload.draw(0, VOCABULARY))
                yield {
                    "measured": "decode",
                    "side": side,
                    "requests": count,
                    "prompt_tokens": prompt,
                    "output_tokens": output,
                    "rounds": 1,
                    "whole_tokens_per_s": round(count * output / answer.seconds, 1),
                    "start_s": round(start_s, 1),
                }
    except (RuntimeError, OSError) as error:
        yield {"measured": "decode", "side": side, "ended": str(error)[:500]}
    finally:
        if process is not None:
            process.kill()


def _kill_after(ending: contextlib.ExitStack, side: Side, seconds: float) -> None:
    timer = threading.Timer(max(0.1, seconds - 3), side.kill)
    timer.daemon = True
    timer.start()
    ending.callback(timer.cancel)
