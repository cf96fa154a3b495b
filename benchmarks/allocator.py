"""Costs of allocation: Quire's pool in process and through its service, against vLLM's KVCacheManager.

All sides get the same prompts, alternately, in one run. The table has medians of the rounds, in microseconds of CPU
time: of one thread in process, and of both processes through the service. A second table has the cost of an operation
on 512 tokens in pools from 1 k to 1 M blocks, and the memory and start time of the largest pool.

Shipped packages have a compiled core; a working copy has an interpreted one. `make bench` measures the compiled one.
The floors in microseconds were set on a machine where vLLM hashes the prompt in 3,144 us. If vLLM is measured, too, the
floors are also scaled to that machine.

vLLM is measured where it can be imported, and left out elsewhere. vLLM's code is needed without its dependencies,
together with the torch and transformers of `.[all]`; a script puts both into one environment:

    scripts/vllm_manager.sh
    build/peers/vllm-manager/bin/python benchmarks/allocator.py

With `--pin`, the service has a single CPU, like the sides in process. Owner and allocator take turns on it. Without it,
client and server wake each other on different CPUs, and a virtual machine hands an idle CPU to its host. A free then
took 10 % more CPU at the median, and 44 % more while the host was busy
(docs/decisions/0057-a-step-and-its-answer-are-one-operation.md).
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import statistics
import sys
from collections.abc import Iterable
from typing import Any

from allocator_sides import long_prompts, scale
from allocator_sides.core_side import CoreSide
from allocator_sides.service_side import ServiceSide
from allocator_sides.vllm_side import VERSION, VllmSide
from allocator_sides.workload import (
    BLOCK_TOKENS,
    DECODES,
    POOL_BLOCKS,
    Costs,
    Decoded,
    Operation,
    draw_decoded,
    draw_round,
)
from quire._serving.process import YOUNG_OBJECTS_MAX
from report import Goal, add_output_arguments, core_build, publish

COLUMNS = ("operation", "pool_blocks", "unit", "vllm", "core", "service", "vllm_over_core", "vllm_over_service")
FLOOR_HASH_US = 3_144.0
BUILD = core_build()
Medians = dict[str, Costs]


def arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=11, help="rounds (default: %(default)s)")
    parser.add_argument("--without", nargs="*", default=[], choices=["vllm", "service", "scale"], help="parts to skip")
    parser.add_argument("--pin", action="store_true", help="run all processes on one CPU")
    add_output_arguments(parser)
    return parser.parse_args()


def measure(options: argparse.Namespace) -> Medians:
    """Returns the medians of each side. The sides take turns; round -1 is a warm-up."""
    decoded = draw_decoded(options.repeat + 1)
    gc.set_threshold(YOUNG_OBJECTS_MAX)  # The server sets the same threshold for garbage collection.
    sides: list[Any] = [CoreSide(decoded)]
    with contextlib.ExitStack() as stack:
        if "service" not in options.without:
            sides.append(stack.enter_context(ServiceSide(decoded)))
        if "vllm" not in options.without:
            sides += vllm_side(decoded)
        rounds: dict[str, list[Costs]] = {side.name: [] for side in sides}
        for number in range(-1, options.repeat):
            work = draw_round(number)
            gc.collect()
            gc.freeze()  # The server freezes, too: the garbage collector does not scan long-lived objects again.
            for side in sides:
                costs = side.measure(work)
                if number >= 0:
                    rounds[side.name].append(costs)
            gc.unfreeze()
    return {name: _medians(measured) for name, measured in rounds.items()}


def vllm_side(decoded: list[Decoded]) -> list[VllmSide]:
    """Returns the baseline. If vLLM cannot be imported, prints that and returns nothing."""
    try:
        side = VllmSide(decoded)
    except ImportError as error:
        print(f"vLLM is left out ({error}); --help says how to install it", file=sys.stderr)
        return []
    if side.version != VERSION:
        print(f"the goals are about vLLM {VERSION}; this is {side.version}", file=sys.stderr)
    return [side]


def _medians(rounds: list[Costs]) -> Costs:
    return {operation: statistics.median(costs[operation] for costs in rounds) for operation in rounds[0]}


def row(operation: str, unit: str, values: dict[str, float], pool_blocks: int = POOL_BLOCKS) -> dict[str, object]:
    """Returns one row of the table. The column of a side without the operation is empty."""
    cells: dict[str, object] = {"operation": operation, "pool_blocks": pool_blocks, "unit": unit}
    cells |= {name: round(value, 4) for name, value in values.items()}
    for side in ("core", "service"):
        if "vllm" in values and side in values:
            cells[f"vllm_over_{side}"] = round(values["vllm"] / values[side], 2)
    return {column: cells.get(column, "") for column in COLUMNS}


def operation_rows(medians: Medians) -> list[dict[str, object]]:
    """Returns one row for each operation."""
    named = (
        (operation, {side: costs[operation] for side, costs in medians.items() if operation in costs})
        for operation in Operation
    )
    return [row(operation, "us", values) for operation, values in named if values]


def slowdown(medians: Medians) -> float:
    """Returns how many times slower this machine is than the machine of the floors; 1 if vLLM was not measured."""
    return medians["vllm"][Operation.HASH] / FLOOR_HASH_US if "vllm" in medians else 1.0


def floor_goals(core: Costs, slower: float) -> Iterable[Goal]:
    """Yields the goals for the core's own cost."""
    for operation, floor_us in (
        (Operation.ADMIT, 10.0),
        (Operation.ADMIT_EVICTING, 25.0),
        (Operation.ADMIT_HIT, 10.0),
        (Operation.FORK, 2.0),
        (Operation.FREE, 2.0),
        (Operation.APPEND, 0.13),
    ):
        yield Goal(f"core, {operation}, us", core[operation], floor_us, "lower")
        if slower != 1.0:
            scaled = core[operation] / slower
            yield Goal(f"core, {operation}, us at the speed of the floors' machine", scaled, floor_us, "lower")
    spread = core[Operation.DECODE_6] / core[Operation.DECODE_1]
    yield Goal("core, decode step, 6 groups over 1", spread, 2.0, "lower")
    spread = core[Operation.DECODE_6] / core[Operation.DECODE_2]
    yield Goal("core, decode step, 1 + 5 groups over 1 + 1", spread, 1.2, "lower")


def ratio_goals(medians: Medians) -> Iterable[Goal]:
    """Yields the goals for vLLM's cost divided by Quire's; none if vLLM was left out."""
    core, service, vllm = medians["core"], medians.get("service"), medians.get("vllm")
    if vllm is None:
        return
    for operation in (Operation.ADMIT, Operation.ADMIT_HIT):
        yield Goal(f"vLLM over core, {operation}, not hashed", vllm[operation] / core[operation], 100.0, "higher")
        hashed = (vllm[operation] + vllm[Operation.HASH]) / (core[operation] + core[Operation.HASH])
        yield Goal(f"vLLM over core, {operation}, hashing included", hashed, 5.0, "higher")
    for operation in DECODES.values():
        yield Goal(f"vLLM over core, {operation}", vllm[operation] / core[operation], 20.0, "higher")
    if service is None:
        return
    for operation in (Operation.ADMIT, Operation.ADMIT_HIT, Operation.DECODE_1):
        ratio = vllm[operation] / service[operation]
        yield Goal(f"vLLM in process over Quire's service, {operation}", ratio, 1.0, "higher")
    ratio = vllm[Operation.FREE] / service[Operation.FREE]
    yield Goal(f"vLLM in process over Quire's service, {Operation.FREE}", ratio, 1.0, "higher")
    # vLLM has no fork: another sample of a prompt is a new request that hits the whole prompt. So a full hit is
    # compared.
    ratio = vllm[Operation.ADMIT_HIT] / service[Operation.FORK]
    yield Goal(f"vLLM's full hit over Quire's service, {Operation.FORK}", ratio, 1.0, "higher")


def measure_scale() -> tuple[list[dict[str, object]], list[Goal]]:
    """Returns the rows and goals of pools of rising sizes."""
    by_size = {size: scale.measure_operations(size) for size in scale.SIZES}
    smallest, largest = scale.SIZES[0], scale.SIZES[-1]
    rows = [
        row(f"512 tokens: {name}", "us", {"core": costs[name]}, size)
        for name in by_size[smallest]
        for size, costs in by_size.items()
    ]
    growth = max(by_size[largest][name] / by_size[smallest][name] for name in by_size[smallest])
    start_s, block_bytes = scale.measure_memory_apart(largest)
    rows.append(row("start of an empty pool", "s", {"core": start_s}, largest))
    rows.append(row("memory a block, pool in use", "bytes", {"core": block_bytes}, largest))
    goals = [
        Goal("core, 1 M blocks over 1 k, the operation that grows most", growth, 1.5, "lower"),
        Goal("core, memory at 1 M blocks, bytes a block", block_bytes, 200.0, "lower"),
        Goal("core, start of a pool of 1 M blocks, s", start_s, 1.0, "lower"),
    ]
    return rows, goals


def main() -> None:
    """Measures everything, and prints or writes the report."""
    options = arguments()
    if options.pin:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # The allocator's process inherits this affinity.
    medians = measure(options)
    slower = slowdown(medians)
    rows = operation_rows(medians)
    long = long_prompts.measure()
    rows += [row(name, "us", {"core": cost}, 2 * long_prompts.TOKENS // BLOCK_TOKENS) for name, cost in long.items()]
    rows.append(row("the core is compiled", "1 if so", {"core": float(BUILD == "compiled")}))
    if options.pin:
        rows.append(row("run all processes on one CPU", "1 if so", {"core": 1.0}))
    if "vllm" in medians:
        rows.append(row("the machine, slower than that of the floors", "times", {"core": slower}))
    goals = [*floor_goals(medians["core"], slower), *ratio_goals(medians)]
    goals.append(Goal(f"core, {long_prompts.LOOKUP}, us", long[long_prompts.LOOKUP], 300.0, "lower"))
    goals.append(Goal(f"core, {long_prompts.STATE_LOOKUP}, us", long[long_prompts.STATE_LOOKUP], 300.0, "lower"))
    goals.append(Goal(f"core, {long_prompts.COMMIT}, us", long[long_prompts.COMMIT], 5_000.0, "lower"))
    if "scale" not in options.without:
        more_rows, more_goals = measure_scale()
        rows += more_rows
        goals += more_goals
    title = f"Allocating, core {BUILD}, against vLLM's KVCacheManager"
    publish(title, rows, goals, as_json=options.json, csv_file=options.csv)


if __name__ == "__main__":
    main()
