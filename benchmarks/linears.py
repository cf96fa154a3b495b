"""Speed of matrix products with packed weights on a CPU: Quire's kernel, torch's linear layer, and oneDNN.

oneDNN's weights are packed once, too (`torch.ops.mkldnn._reorder_linear_weight`, for the measured number of rows);
torch itself does this only inside its compiler. The shapes are the same as in the two models of `serving.py`. The sides
take turns on one thread of torch; rows have medians of the thread's CPU time. Each result is first compared with
float64.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from quire_cpu.library import Library, load
from quire_cpu.ops import PackedLinear
from report import Goal, add_output_arguments, publish

# (outputs, inputs) of the matrices q/k/v, gate and up, down, and vocabulary. First those of a model of 32 M parameters,
# then those of the demo model.
SHAPES = ((1024, 512), (2816, 512), (512, 1408), (8192, 512), (512, 256), (256, 256), (2048, 256))
ROWS = (1, 4, 32, 512)
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2}
ROUNDS_S = 0.2  # least seconds for a shape
Side = Callable[[], torch.Tensor]


def arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"], choices=["float32", "bfloat16"])
    parser.add_argument("--repeat", type=int, default=9, help="minimum number of rounds (default: %(default)s)")
    add_output_arguments(parser)
    return parser.parse_args()


def sides_of(library: Library, weight: torch.Tensor, x: torch.Tensor) -> dict[str, Side]:
    """Returns the sides, which compute x @ weight^T."""
    packed, ops = PackedLinear(library, [weight]), torch.ops.mkldnn
    reordered = ops._reorder_linear_weight(weight, x.shape[0])
    return {
        "quire": lambda: packed(x),
        "torch": lambda: torch.nn.functional.linear(x, weight),
        "onednn": lambda: ops._linear_pointwise(x, reordered, None, "none", [], ""),
    }


@torch.inference_mode()
def measure(library: Library, shape: tuple[int, int], rows: int, dtype: torch.dtype, repeat: int) -> dict[str, Any]:
    """Returns one row: the microseconds of every side, and the best peer's divided by Quire's."""
    torch.manual_seed(0)
    outputs, inputs = shape
    weight, x = torch.randn(outputs, inputs).to(dtype) / inputs**0.5, torch.randn(rows, inputs).to(dtype)
    expected = x.double() @ weight.double().t()
    sides = sides_of(library, weight, x)
    for name, side in sides.items():
        error = (side().double() - expected).abs().max().item()
        if not error <= TOLERANCE[dtype]:
            raise ValueError(f"{name} is off by {error} at {shape} with {rows} rows of {dtype}")
    times: dict[str, list[float]] = {name: [] for name in sides}
    end = time.perf_counter() + ROUNDS_S
    while len(times["quire"]) < repeat or time.perf_counter() < end:
        for name, side in sides.items():
            started = time.thread_time_ns()
            side()
            times[name].append((time.thread_time_ns() - started) / 1e3)
    medians = {name: statistics.median(values) for name, values in times.items()}
    return {
        "dtype": str(dtype).removeprefix("torch."),
        "outputs": outputs,
        "inputs": inputs,
        "rows": rows,
        **{f"{name}_us": round(us, 1) for name, us in medians.items()},
        "quire_gflops": round(2 * rows * outputs * inputs / medians["quire"] / 1e3, 1),
        "best_peer_over_quire": round(min(medians["torch"], medians["onednn"]) / medians["quire"], 2),
    }


def main() -> None:
    """Measures everything, and prints or writes the report."""
    options = arguments()
    torch.set_num_threads(1)
    library = load()
    if not isinstance(library, Library):
        sys.exit(f"there are no CPU kernels to measure: {library.reason}")
    library.follow_torch_threads()
    rows = [
        measure(library, shape, count, getattr(torch, dtype), options.repeat)
        for dtype in options.dtypes
        for shape in SHAPES
        for count in ROWS
    ]
    goals = [
        Goal(f"best peer over Quire, {dtype}, worst shape", min(
            float(row["best_peer_over_quire"]) for row in rows if row["dtype"] == dtype
        ), 1.0, "higher")
        for dtype in options.dtypes
    ]  # fmt: skip
    publish("Matrix products on a CPU", rows, goals, as_json=options.json, csv_file=options.csv)


if __name__ == "__main__":
    main()
