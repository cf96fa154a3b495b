"""Speed of attention over pages.

On a CPU: the worker's path against gathering each sequence, padding the batch, and flex attention, all in one run
(`kernel_sides/cpu.py`). The ratio is the best peer's time divided by the worker's: above 1 the worker is faster.
Flex attention with packed heads is shown in addition.

On a CUDA GPU: the Triton kernels against vLLM's Triton kernels (where they can be imported), SDPA and flex attention,
as shares of a copy and a matrix product in the same run (`kernel_sides/gpu.py`). No case starts after `--budget-s`, so
that a run takes less than 8 minutes. Progress is on stderr.

The GPU is measured if there is one, else the CPU; `--parts cpu gpu` measures both. `--json` prints one object.
"""

from __future__ import annotations

import argparse
import itertools
import sys

import torch
from kernel_sides import gpu_cases
from report import Goal, Part, publish_parts

PEERS = ("flex", "sdpa", "torch", "triton", "vllm")


def arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=["cpu", "gpu"], help="default: gpu if there is one, else cpu")
    parser.add_argument(
        "--repeat", type=int, help="rounds: the minimum on a CPU, the maximum on a GPU (default: 9, 21)"
    )
    parser.add_argument("--without", nargs="*", default=[], choices=PEERS, help="peers to skip; the CPU has only flex")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    on_cpu = parser.add_argument_group("on the CPU")
    on_cpu.add_argument("--threads", type=int, default=1, help="threads of torch (default: %(default)s)")
    on_cpu.add_argument("--dtypes", nargs="+", choices=["float32", "bfloat16"], default=["float32"])
    on_cpu.add_argument(
        "--cases", type=int, metavar="COUNT", help="run only the first COUNT cases of each dtype (default: all)"
    )
    on_cpu.add_argument("--csv", help="append the CPU's rows to this file")
    on_gpu = parser.add_argument_group("on the GPU", "which cases; all by default")
    on_gpu.add_argument("--works", nargs="+", choices=gpu_cases.WORKS, default=gpu_cases.WORKS)
    on_gpu.add_argument("--shapes", nargs="+", choices=gpu_cases.SHAPES, default=list(gpu_cases.SHAPES))
    for option, default in (
        ("--batches", gpu_cases.BATCHES), ("--contexts", gpu_cases.CONTEXTS), ("--page-sizes", gpu_cases.PAGE_SIZES),
    ):  # fmt: skip
        on_gpu.add_argument(option, nargs="+", type=int, default=default, metavar="N")
    on_gpu.add_argument(
        "--budget-s", type=float, default=400.0, help="start no case after this many seconds (default: %(default)s)"
    )
    on_gpu.add_argument(
        "--operations-max",
        type=float,
        default=gpu_cases.OPERATIONS_MAX,
        help="most operations of a launch (default: %(default).0e)",
    )
    on_gpu.add_argument("--csv-gpu", help="append the GPU's rows to this file")
    return parser.parse_args()


def measure_cpu(options: argparse.Namespace) -> Part:
    """Returns a row and a goal per case."""
    from kernel_sides import cpu

    torch.set_num_threads(options.threads)
    rows, goals = [], []
    dtypes = [getattr(torch, name) for name in options.dtypes]
    for case in itertools.chain.from_iterable(itertools.islice(cpu.cases([dtype]), options.cases) for dtype in dtypes):
        row = cpu.measure(case, repeat=options.repeat or 9, with_flex="flex" not in options.without)
        rows.append({"threads": options.threads, **row})
        goals.append(Goal(f"best peer over the CPU path, {case.title}", float(str(row["ratio"])), 1.0, "higher"))
    return Part("Attention over pages, CPU, milliseconds", rows, goals, options.csv)


def measure_gpu(options: argparse.Namespace) -> Part:
    """Returns a row per case, and the goals over all cases."""
    from kernel_sides import gpu, gpu_goals

    cases = list(gpu_cases.cases(options.works, options.shapes, options.batches, options.contexts, options.page_sizes))
    if not cases:
        sys.exit("no such case: prompts of latent attention are not measured")

    def progress(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    bench = gpu.cuda_bench(options.repeat or 21)
    progress(
        f"copy {bench.copy_bytes_per_s / 1e12:.2f} TB/s, product {bench.matmul_operations_per_s / 1e12:.0f} TFLOP/s"
    )
    rows = gpu.measure_all(
        cases, bench, operations_max=options.operations_max, budget_s=options.budget_s, without=options.without,
        progress=progress,
    )  # fmt: skip
    return Part("Attention over pages, GPU", rows, gpu_goals.goals(rows), options.csv_gpu)


def accelerator() -> str:
    """Returns the GPU and the compiler of its kernels."""
    import triton

    return f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}"


def main() -> None:
    """Measures everything, and prints or writes the report."""
    options = arguments()
    has_gpu = torch.cuda.is_available()
    wanted = options.parts or (["gpu"] if has_gpu else ["cpu"])
    if not has_gpu:
        print("no CUDA GPU: the Triton kernels are not measured", file=sys.stderr)
        wanted = ["cpu"]
    measures = {"gpu": measure_gpu, "cpu": measure_cpu}
    parts = [measure(options) for name, measure in measures.items() if name in wanted]
    publish_parts(parts, as_json=options.json, accelerator=accelerator() if "gpu" in wanted else "")


if __name__ == "__main__":
    main()
