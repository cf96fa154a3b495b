"""How fast attention over pages is.

On a CPU: the worker's path against gathering each sequence, padding the batch, and flex attention, all in one run
(`kernel_sides/cpu.py`); the ratio is the best of them over the worker's, above 1 the worker is faster. Flex attention
packed by hand is shown beside them. With a CUDA GPU
also the Triton kernels: bandwidth of decode and of latent attention as a share of a copy, operations of prefill as a
share of a matrix product, both measured in the same run (`kernel_sides/gpu.py`). Without one it says so.
"""

from __future__ import annotations

import argparse
import sys

import torch
from kernel_sides import cpu
from report import Goal, publish


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=9, help="rounds, at least (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="of torch on the CPU (default: %(default)s)")
    parser.add_argument("--dtypes", nargs="+", choices=["float32", "bfloat16"], default=["float32"], help="on the CPU")
    parser.add_argument("--without", nargs="*", default=[], choices=["cpu", "flex", "gpu"], help="parts to skip")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("--csv", help="append the CPU's rows to this file")
    parser.add_argument("--csv-gpu", help="append the GPU's rows to this file")
    return parser.parse_args()


def measure_cpu(options: argparse.Namespace) -> tuple[list[dict[str, object]], list[Goal]]:
    """A row and a goal per case."""
    torch.set_num_threads(options.threads)
    rows, goals = [], []
    for case in cpu.cases([getattr(torch, name) for name in options.dtypes]):
        row = cpu.measure(case, repeat=options.repeat, with_flex="flex" not in options.without)
        rows.append({"threads": options.threads, **row})
        goals.append(Goal(f"best peer over the CPU path, {case.title}", float(str(row["ratio"])), 1.0, "higher"))
    return rows, goals


def main() -> None:
    """Measures and reports."""
    options = arguments()
    title = "Attention over pages"
    if "cpu" not in options.without:
        rows, goals = measure_cpu(options)
        publish(f"{title}, CPU, milliseconds", rows, goals, as_json=options.json, csv_file=options.csv)
    if "gpu" in options.without:
        return
    if not torch.cuda.is_available():
        print("no CUDA GPU: the Triton kernels are not measured", file=sys.stderr)
        return
    from kernel_sides import gpu

    rows, goals = gpu.measure(options.repeat)
    publish(f"{title}, {torch.cuda.get_device_name()}", rows, goals, as_json=options.json, csv_file=options.csv_gpu)


if __name__ == "__main__":
    main()
