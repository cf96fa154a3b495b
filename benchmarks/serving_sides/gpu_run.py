"""Measures serving on a GPU, for `serving.py --device cuda` and as a part of `scripts/gpu_proof.py`.

    1. the chip        measures a copy and a matrix product
    2. the model       writes a configuration; each side draws random weights on the GPU
    3. Quire           measures allocator, worker and client (`on_gpu`)
    4. transformers    measures each side alone on the GPU, on the workloads of Quire's rows

Without a GPU, the demo model runs on the CPU instead. Every step runs, but the figures mean nothing.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from report import machine

from serving_sides.ceiling import Bounds, Chip, chip
from serving_sides.gpu_goals import TRANSFORMERS
from serving_sides.models import DEMO, describe_model
from serving_sides.on_gpu import ALL, TINY, Measurement, decode_rows, measure, memory_row
from serving_sides.probed_stack import ProbedStack
from serving_sides.process import Side
from serving_sides.workload import KINDS, Workload

Row = dict[str, Any]
MODEL = "llama-8b"
UTILIZATION, BLOCK_TOKENS = 0.9, 16
ON_GPU = (
    "--device", "cuda", "--dtype", "bfloat16", "--gpu-memory-utilization", str(UTILIZATION),
    "--block-size", str(BLOCK_TOKENS),
)  # fmt: skip
ON_CPU = ("--blocks", "512")
SIDES_S = {"generate": 150.0, "generate_batch": 60.0}  # time limits; compiling takes most of the first
# Workloads, by their number of requests, whose processes are on the GPU at the same time. All three processes of
# `generate` might not fit together.
TOGETHER = {"generate": ((1, 128), (32,)), "generate_batch": ((32, 1, 128),)}
VOCABULARY = 256  # number of tokens from which the prompts of transformers are drawn
# Environment variables for the worker, by preference. If a worker with the first ones does not answer, the next are
# tried.
SETTINGS: tuple[dict[str, str], ...] = (
    {"QUIRE_LAUNCH_AHEAD": "1"},
    {"QUIRE_LAUNCH_AHEAD": "0"},
    {"QUIRE_LAUNCH_AHEAD": "0", "QUIRE_HOPPER": "0"},
)
# A second measurement of `decode`, and its time limit. In this measurement, each pass starts after the previous one has
# ended.
WAITING: dict[str, str] = {"QUIRE_LAUNCH_AHEAD": "0"}
WAITING_S = 60.0
FIRST, FIRST_S = (64, 8), 15.0  # prompt and output tokens of the first requests, and their time limit
PLAN_S = 8.0  # time limit for `quire plan`
START_S = 110.0  # time limit for a side's start


def rows(
    *,
    has_gpu: bool,
    sides: Collection[str],
    left_s: Callable[[], float],
    logs: Path,
    wanted: Measurement | None = None,
) -> Iterator[Row]:
    """Yields rows as they are measured. A side that fails has a row that says so.

    Args:
        has_gpu: whether to use the GPU; else the CPU, on tiny workloads.
        sides: any of "quire", "generate" and "generate_batch".
        left_s: returns the seconds left. Measurements that would end too late are left out.
        logs: folder of the servers' logs; exists.
        wanted: the measurements, if not the device's defaults.
    """
    wanted = wanted or (ALL if has_gpu else TINY)
    speed = chip() if has_gpu else Chip(1e10, 1e10)
    _free()
    yield {
        "measured": "chip",
        "machine": accelerator() if has_gpu else machine(),
        "copied_tb_per_s": round(speed.copied_bytes_per_s / 1e12, 3),
        "multiplied_tflop_per_s": round(speed.multiplied_per_s / 1e12, 1),
    }
    with tempfile.TemporaryDirectory() as made:
        model = describe_model(MODEL, Path(made)) if has_gpu else DEMO
        if "quire" in sides:
            try:
                yield from _quire_rows(model, wanted, speed, left_s, logs, has_gpu=has_gpu, sides=sides)
            except Exception as error:  # The other sides can still be measured.
                yield {"measured": "quire", "passed": False, "why": f"{type(error).__name__}: {error}"[:2000]}
        for side in TRANSFORMERS:
            if side in sides and left_s() > 20:
                yield from _transformers_rows(side, model, wanted, left_s, logs, has_gpu=has_gpu)


def _quire_rows(
    model: Path,
    wanted: Measurement,
    speed: Chip,
    left_s: Callable[[], float],
    logs: Path,
    *,
    has_gpu: bool,
    sides: Collection[str],
) -> Iterator[Row]:
    """Yields a row with the name of the first of `SETTINGS` that makes the worker answer, and the rows of this setting.
    If it is the first setting, adds rows of `decode` under `WAITING`: side "quire, waiting", with its turn divided by
    the usual one."""
    turns_ms: dict[tuple[int, int], float | None] = {}
    bounds = Bounds(model, speed, element_bytes=2)
    environment = {"QUIRE_PROBE_DUMMY": "1"} if has_gpu else {}
    for setting in SETTINGS:
        stack = ProbedStack(
            model, logs, ON_GPU if has_gpu else ON_CPU, start_timeout_s=min(START_S, left_s()),
            environment=environment | setting,
        )  # fmt: skip
        with contextlib.closing(stack):
            try:
                asked = Workload(KINDS[0], 4, *FIRST).draw(-9, stack.status.vocabulary_size)
                answered = stack.round(asked, limit_s=FIRST_S)
            except Exception as error:
                yield {"measured": "setting", **setting, "passed": False, "why": f"{type(error).__name__}: {error}"}
                continue
            yield {"measured": "setting", **setting, "passed": True, "first_s": round(answered.seconds, 2),
                   "start_s": round(stack.start_s, 1)}  # fmt: skip
            is_compared = setting == SETTINGS[0]
            others_s = sum(SIDES_S[side] for side in sides if side in SIDES_S) + (WAITING_S if is_compared else 0.0)
            try:
                for row in measure(stack, wanted, bounds, lambda: left_s() - PLAN_S, others_s=others_s):
                    if row["measured"] == "decode":
                        turns_ms[row["requests"], row["prompt_tokens"]] = row["turn_ms"]
                    yield row
            except TimeoutError as error:
                yield {"measured": "setting", **setting, "passed": False, "why": str(error)}
                continue
            total_bytes = _memory_bytes() if has_gpu else 2 << 30
            yield memory_row(stack, model, total_bytes, UTILIZATION, BLOCK_TOKENS)
        if is_compared and left_s() > others_s:  # The sides of transformers have priority.
            stack = ProbedStack(
                model, logs, ON_GPU if has_gpu else ON_CPU, start_timeout_s=min(START_S, left_s()),
                environment=environment | WAITING,
            )  # fmt: skip
            with contextlib.closing(stack):
                for row in decode_rows(stack, wanted, bounds, left_s, side="quire, waiting"):
                    ahead_ms, waiting_ms = turns_ms.get((row["requests"], row["prompt_tokens"])), row["turn_ms"]
                    gain = round(waiting_ms / ahead_ms, 3) if ahead_ms and waiting_ms else None
                    yield row | {"turn_over_launched_ahead": gain}
        return


def _free() -> None:
    """Frees this process's GPU memory for the worker."""
    import gc

    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def accelerator() -> str:
    """Returns the machine, its GPU, and the software that computes on it."""
    import torch
    import triton

    return f"{machine()}, {torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}"


def _memory_bytes() -> int:
    import torch

    return int(torch.cuda.mem_get_info()[1])


def _transformers_rows(
    side: str, model: Path, wanted: Measurement, left_s: Callable[[], float], logs: Path, *, has_gpu: bool
) -> Iterator[Row]:
    """Yields a row for each of the first workloads of `wanted.decode` that `side` finishes in time.

    `generate` compiles and captures for each batch size, which takes a minute of one CPU. So each of its workloads has
    a process, several processes warm up at the same time, and then they are measured one after another.
    """
    device, dtype = ("cuda", "bfloat16") if has_gpu else ("cpu", "float32")
    command = [sys.executable, "-m", "serving_sides.transformers_side", str(model), dtype, device, side]
    ended_at = time.monotonic() + min(SIDES_S[side], left_s())
    for counts in TOGETHER[side] if has_gpu else ({each[0] for each in wanted.decode},):
        workloads = [Workload(KINDS[0], *each) for each in wanted.decode[:3] if each[0] in counts]
        alone = [[each] for each in workloads] if side == "generate" else [workloads]
        sides = [_Warmed(command, each, logs / f"{side}-{each[0].request_count}.log", ended_at) for each in alone]
        with contextlib.ExitStack() as ending, ThreadPoolExecutor(len(sides)) as pool:
            for each in sides:
                ending.callback(each.end)
            for each in [*pool.map(_Warmed.start, sides)]:
                yield from each.rows(side)


class _Warmed:
    """A side of transformers in its own process, with its workloads. The process is killed at `ended_at`."""

    def __init__(self, command: list[str], workloads: list[Workload], log: Path, ended_at: float) -> None:
        self._command, self._workloads, self._log, self._ended_at = command, workloads, log, ended_at
        self._process: Side | None = None
        self._timer: threading.Timer | None = None
        self._start_s, self._error = 0.0, ""

    def start(self) -> _Warmed:
        """Loads the model and warms it up, with the same lengths if transformers compiles for each length."""
        started = time.monotonic()
        try:
            self._process = Side(self._command, log=self._log, on_start=self._kill_in_time)
            self._start_s = time.monotonic() - started
            for each in self._workloads:
                compiles = self._command[-1] == "generate"
                self._process.generate((each if compiles else replace(each, output_tokens=8)).draw(-1, VOCABULARY))
        except (RuntimeError, OSError) as error:
            self._error = str(error)
        return self

    def rows(self, side: str) -> Iterator[Row]:
        """Yields the measured rows, or one that says how the process ended."""
        for each in self._workloads:
            row: Row = {"measured": "decode", "side": side, "requests": each.request_count}
            try:
                if self._error or self._process is None:
                    raise RuntimeError(self._error)
                answer = self._process.generate(each.draw(0, VOCABULARY))
            except (RuntimeError, OSError) as error:
                yield row | {"ended": str(error)[:500]}
                return
            yield row | {
                "prompt_tokens": each.prompt_tokens,
                "output_tokens": each.output_tokens,
                "rounds": 1,
                "whole_tokens_per_s": round(each.request_count * each.output_tokens / answer.seconds, 1),
                "start_s": round(self._start_s, 1),
            }

    def end(self) -> None:
        """Kills the process, which frees its GPU memory."""
        if self._timer is not None:
            self._timer.cancel()
        if self._process is not None:
            self._process.kill()

    def _kill_in_time(self, process: Side) -> None:
        self._process = process
        self._timer = threading.Timer(max(0.1, self._ended_at - time.monotonic() - 3), process.kill)
        self._timer.daemon = True
        self._timer.start()
