"""The Triton kernels on a CUDA GPU and their peers, as shares of the chip's speed in the same run.

Two speeds are measured first: a copy of 4 GiB (bytes read and written), and a matrix product of 8192 x 8192 in the same
dtype. One share compares the bytes that a launch must move at least with the copy. The other compares the operations of
the pairs that a causal mask leaves with the matrix product. Before any timing, the results of a batch's sides
(`gpu_scenes.py`) are compared: Quire's with plain float32 for a few tokens, every peer's with Quire's for all tokens. A
side that differs is not timed, and its row says so. Then all sides are launched one after another, in random order,
each with cold caches. Rows have medians, and medians of the ratios of each round.

A side may be left out by rule, for lack of time, or because it failed. The case's row says why.
"""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from kernel_sides.flex import Side
from kernel_sides.gpu_cases import Case, Latent, left_out, side_left_out
from kernel_sides.gpu_goals import Row
from kernel_sides.gpu_scenes import Scene, scene_of

PEERS = ("vllm", "sdpa", "flex", "torch", "triton")
ROUNDS_MIN, ROUNDS_MS = 3, 1500.0  # A case may end after ROUNDS_MIN rounds, if they took ROUNDS_MS.
FLUSH_BYTES, COPY_BYTES, MATRIX_SIZE = 2 << 30, 4 << 30, 8192
COMPARED_TOKENS = 1 << 14  # tokens compared at once, so that temporaries stay small
# Largest difference in a head's row, divided by the row's root mean square. Two roundings to bfloat16 differ by up to
# 2^-7 of an element, and the largest element of many rows is about 5 times the root mean square.
TOLERANCE = {torch.bfloat16: 0.1, torch.float32: 1e-3}

Timer = Callable[[Side], float]


@dataclass(frozen=True, slots=True)
class Bench:
    """The device and how to measure on it: from `cuda_bench` for a GPU, made by hand in tests."""

    device: torch.device
    dtype: torch.dtype
    timer: Timer  # measures the milliseconds of a launch
    synchronize: Callable[[], None]  # raises if the device is lost
    memory_bytes: float
    copy_bytes_per_s: float
    matmul_operations_per_s: float
    rounds: int


class CudaTimer:
    """Measures time on the device, with cold caches."""

    def __init__(self) -> None:
        self._other = torch.zeros(FLUSH_BYTES // 4, device="cuda")

    def __call__(self, side: Side) -> float:
        """Runs one side and returns its time on the device in milliseconds."""
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        # This read takes half a millisecond. It clears the cache, and leaves nothing to write back. In the meantime the
        # host launches the measured side, so that the device never waits for the host.
        self._other.sum()
        start.record()
        side()
        stop.record()
        stop.synchronize()
        return start.elapsed_time(stop)


def cuda_bench(rounds: int) -> Bench:
    """Measures the limits of this machine's first GPU, and returns its bench."""
    memory_bytes = 0.95 * torch.cuda.mem_get_info()[0]
    timer, dtype = CudaTimer(), torch.bfloat16
    source = torch.zeros(COPY_BYTES, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    a, b = torch.randn(2, MATRIX_SIZE, MATRIX_SIZE, device="cuda", dtype=dtype)
    times = time_sides({"copy": lambda: target.copy_(source), "matmul": lambda: a @ b}, timer, 2 * rounds)
    copy_s, matmul_s = (statistics.median(times[name]) / 1e3 for name in ("copy", "matmul"))
    return Bench(
        torch.device("cuda"), dtype, timer, torch.cuda.synchronize, memory_bytes, 2 * COPY_BYTES / copy_s,
        2 * MATRIX_SIZE**3 / matmul_s, rounds,
    )  # fmt: skip


def difference(result: torch.Tensor, expected: torch.Tensor) -> float:
    """Returns the largest difference in a row, divided by the expected row's root mean square; NaN if any is NaN.

    Args:
        result: `[tokens, heads, dim]`.
        expected: the same shape.
    """
    if result.shape != expected.shape:
        raise ValueError(f"the result has the shape {tuple(result.shape)}, not {tuple(expected.shape)}")
    worst = torch.zeros((), device=expected.device)
    for ours, theirs in zip(result.split(COMPARED_TOKENS), expected.split(COMPARED_TOKENS), strict=True):
        wanted = theirs.float()
        size = wanted.square().mean(-1).sqrt().clamp_min(1e-30)
        worst = torch.maximum(worst, ((ours.float() - wanted).abs().amax(-1) / size).amax())
    return worst.item()


def time_sides(sides: dict[str, Side], timer: Timer, rounds: int) -> dict[str, list[float]]:
    """Returns the milliseconds of each side, round by round. Long sides have fewer rounds."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    order, shuffle, spent_ms = list(sides.items()), random.Random(0).shuffle, 0.0
    for number in range(rounds + 1):
        shuffle(order)
        for name, side in order:
            elapsed_ms = timer(side)
            if number:
                times[name].append(elapsed_ms)
                spent_ms += elapsed_ms
        if number >= ROUNDS_MIN and spent_ms > ROUNDS_MS:
            break
    return times


@torch.inference_mode()
def measure_case(case: Case, bench: Bench, *, without: Collection[str] = (), scene: Scene | None = None) -> Row:
    """Returns one row. A peer that fails or differs is noted. Quire's errors are raised.

    Raises:
        ValueError: Quire's result differs from the reference.
    """
    scene = scene or scene_of(case, bench.device, bench.dtype)
    tolerance, quire = TOLERANCE[bench.dtype], scene.quire()
    expected = quire()
    numbers, reference = scene.reference()
    error = difference(expected[numbers], reference)
    if not error <= tolerance:
        raise ValueError(f"Quire differs from the reference by {error:.2g} of a row")
    sides, notes = {"quire": quire}, []
    for name, build in scene.peers.items():
        if name in without:
            continue
        why = side_left_out(case, name, memory_bytes=bench.memory_bytes)
        if not why:
            try:
                sides[name] = build()
                error = difference(sides[name](), expected)
                why = "" if error <= tolerance else f"differs by {error:.2g} of a row"
            except Exception as raised:  # A peer may not support this shape, or not be installed.
                why = _line(raised)
                if lost := _lost(bench):
                    raise RuntimeError(f"{name}: {lost}") from raised
        if why:
            sides.pop(name, None)
            notes.append(f"{name}: {why}")
    del expected
    return _row(case, bench, "measured", "; ".join(notes), time_sides(sides, bench.timer, bench.rounds))


def _row(case: Case, bench: Bench, status: str, note: str, times: dict[str, list[float]]) -> Row:
    quire = times.get("quire", [])
    quire_s = statistics.median(quire) / 1e3 if quire else 0.0
    row: Row = {
        "device": bench.device.type,
        "work": "MLA decode" if isinstance(case.shape, Latent) else case.work,
        "shape": case.shape.name,
        "batch": case.batch,
        "context": case.context,
        "page_size": case.page_size,
        "status": status,
        "rounds": len(quire),
        "copy_gb_per_s": round(bench.copy_bytes_per_s / 1e9, 1),
        "matmul_tflop_per_s": round(bench.matmul_operations_per_s / 1e12, 1),
        "gb_per_s": "",
        "tflop_per_s": "",
        "share_copy": "",
        "share_matmul": "",
    }
    if quire:
        bytes_per_s, operations_per_s = case.moved_bytes / quire_s, case.operations / quire_s
        row["gb_per_s"], row["tflop_per_s"] = round(bytes_per_s / 1e9, 1), round(operations_per_s / 1e12, 2)
        row["share_copy"] = round(bytes_per_s / bench.copy_bytes_per_s, 3)
        row["share_matmul"] = round(operations_per_s / bench.matmul_operations_per_s, 3)
    for name in ("quire", *PEERS):
        row[f"{name}_ms"] = round(statistics.median(times[name]), 4) if name in times else ""
    for name in PEERS:
        rounds = zip(times.get(name, []), quire, strict=False)
        ratios = [theirs / ours for theirs, ours in rounds]
        row[f"{name}_ratio"] = round(statistics.median(ratios), 3) if ratios else ""
    row["note"] = note
    return row


def measure_all(
    cases: Iterable[Case], bench: Bench, *, operations_max: float, budget_s: float, without: Collection[str] = (),
    progress: Callable[[str], None], clock: Callable[[], float] = time.monotonic,
) -> list[Row]:  # fmt: skip
    """Returns a row per case, also for cases that are left out or fail. No case starts after `budget_s`."""
    started, rows, lost = clock(), [], ""
    for case in cases:
        status, note = "left out", left_out(case, memory_bytes=bench.memory_bytes, operations_max=operations_max)
        if not note and clock() - started > budget_s:
            note = f"no time: {budget_s:.0f} s are over"
        if lost:
            note = note or lost
        if note:
            row = _row(case, bench, status, note, {})
        else:
            try:
                row = measure_case(case, bench, without=without)
            except Exception as raised:  # Other cases can still be measured.
                row = _row(case, bench, "failed", _line(raised), {})
                lost = _lost(bench)
            if bench.device.type == "cuda" and not lost:
                gc.collect()  # The frames of an exception hold tensors, which must be freed.
                torch.cuda.empty_cache()
        rows.append(row)
        progress(f"{clock() - started:5.0f} s  {case.title}: {_summary(row)}")
    return rows


def _lost(bench: Bench) -> str:
    try:
        bench.synchronize()
    except Exception as raised:
        return f"the device was lost: {_line(raised)}"
    return ""


def _summary(row: dict[str, Any]) -> str:
    if row["status"] != "measured":
        return f"{row['status']}, {row['note']}"
    ratios = [f"{name} {row[f'{name}_ratio']}" for name in PEERS if row[f"{name}_ratio"] != ""]
    shares = f"{row['share_copy']} of a copy, {row['share_matmul']} of a product"
    return "; ".join([f"{row['quire_ms']} ms, {shares}", *ratios, *filter(None, [row["note"]])])


def _line(error: BaseException) -> str:
    """Returns the first line of an error, with its type."""
    text = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {text[0]}"[:200]
