"""Hit ratios of prompts in models of several kinds of attention, one request at a time.

It prints the share of prompt tokens that were cached, for five sides: Quire's core, vLLM's KVCacheManager with dense
and with sparse retention, a pool of the same bytes where every layer keeps every token, and an upper bound over all
groups that knows the future (`hybrid_sides/optimum.py`). `--sides` adds bounds of policies that know only how long ago
a text was used, or also its turn and length (`hybrid_sides/ages.py`). For the trace it adds the hits with times learned
from the other samples of its sessions. In the shape `states alone`, which has no attention, the side `quire without
history` remembers no prompts, so it cannot see where later prompts diverge.

Every side has the same bytes, with its own layout. The *load* gives their number: load = working set / pool. The
working set is the bytes at the fullest moment of a cache that keeps exactly the blocks that a later prompt can hit.
These are blocks of full attention, and the tail where a prompt continues (a window of each windowed layer, a state of
each recurrent layer). The blocks of the running request count too. With a load of 2, half of that fits. The longest
request fits into every pool. Loads with smaller pools are replaced by one load, with the smallest pool that fits.

`--random` measures drawn scenarios instead (`hybrid_sides/scenarios.py`): a number draws model, workload and load, a
row each.

vLLM is measured where it can be imported, and left out elsewhere. vLLM's manager needs only vLLM's code and the modules
that it imports. A script puts both into an environment with the torch and transformers of `.[all]`:

    scripts/vllm_manager.sh
    build/peers/vllm-manager/bin/python benchmarks/hybrid.py
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hybrid_sides import ages, optimum
from hybrid_sides.quire_side import RETENTIONS, QuireSide
from hybrid_sides.scenarios import draw
from hybrid_sides.shapes import Shape, all_shapes, states_alone
from hybrid_sides.vllm_side import RETENTION_INTERVALS, VERSION, VllmSide
from hybrid_sides.workloads import FULL_SCALE, QUICK_SCALE, TRACE, WORKLOADS, Request, trace
from report import Goal, add_output_arguments, publish

LOADS = (0.5, 1.0, 1.5, 2.0, 4.0)
LOAD_OF_OPTIMUM_GOAL = 1.5
CHUNK_TOKENS = 2_048
ROOM_TO_RUN = 1.25  # smallest pool over the longest request's bytes, because pages have padding and blocks are not full
QUIRE, OPTIMUM, FULL = "quire", "optimum", "full attention only"
FORGETFUL = "quire without history"
VLLM = tuple(f"vllm {retention}" for retention in RETENTION_INTERVALS)
AGES, AGES_BY_CLASS = "ages known", "ages and classes known"
LEARNED = {
    "ages learned": ages.all_alike,
    "ages and classes learned": ages.by_turn_and_length,
    "ages, classes and waits learned": ages.by_turn_length_and_wait,
}
FORCED = tuple(f"quire {retention}" for retention in RETENTIONS)
Row = dict[str, Any]


def arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    shapes, sides = list(all_shapes()), [QUIRE, *VLLM, FULL, OPTIMUM]
    workloads = [*WORKLOADS, TRACE]
    parser.add_argument(
        "--trace",
        type=Path,
        help="file of requests, one line of JSON per request; without it the workload `trace` is left out",
    )
    parser.add_argument("--quick", action="store_true", help="run small workloads, in less than a minute")
    parser.add_argument(
        "--random", type=int, default=0, metavar="COUNT", help="also run the random scenarios 0 to COUNT - 1"
    )
    named = [*shapes, states_alone().name]
    parser.add_argument("--shapes", nargs="+", default=shapes, choices=named, metavar="SHAPE", help=", ".join(named))
    parser.add_argument(
        "--workloads", nargs="+", default=workloads, choices=workloads, metavar="WORKLOAD", help=", ".join(workloads)
    )
    parser.add_argument("--loads", nargs="+", type=float, default=LOADS, help="ratios of working set to pool")
    parser.add_argument(
        "--sides",
        nargs="+",
        default=sides,
        choices=[*sides, AGES, AGES_BY_CLASS, *LEARNED, *FORCED, FORGETFUL],
        metavar="SIDE",
        help=", ".join([*sides, AGES, AGES_BY_CLASS, *LEARNED, *FORCED, FORGETFUL]),
    )
    parser.add_argument("--chunk", type=int, default=CHUNK_TOKENS, help="tokens of one pass (default: %(default)s)")
    add_output_arguments(parser)
    return parser.parse_args()


def usable_sides(wanted: Sequence[str]) -> list[str]:
    """Returns the requested sides, without vLLM's where it cannot be imported, which is printed."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # Otherwise vLLM logs the padding of each pool.
    try:
        import vllm
    except ImportError as error:
        print(f"vLLM is left out ({error}); --help says how to install it", file=sys.stderr)
        return [side for side in wanted if side not in VLLM]
    if vllm.__version__ != VERSION:
        print(f"the goals are about vLLM {VERSION}; this is {vllm.__version__}", file=sys.stderr)
    return list(wanted)


def make_side(name: str, shape: Shape, pool_bytes: int, chunk_tokens: int) -> QuireSide | VllmSide:
    """Returns an empty cache of one side."""
    if name in VLLM:
        return VllmSide(shape, pool_bytes, chunk_tokens, name.split()[1])
    if name == FULL:
        return QuireSide.full_attention(shape, pool_bytes, chunk_tokens)
    if name == FORGETFUL:
        return QuireSide.forgetful(shape, pool_bytes, chunk_tokens)
    return QuireSide.planned(shape, pool_bytes, chunk_tokens, "" if name == QUIRE else name.split()[1])


def measure(
    shape: Shape,
    workload: str,
    requests: Sequence[Request],
    loads: Sequence[float],
    *,
    chunk_tokens: int,
    sides: Sequence[str],
    others: Sequence[Sequence[Request]] = (),
) -> list[Row]:
    """Returns one row per load. Ages are learned from the requests `others`."""
    reuses = optimum.find_reuses(requests, shape)
    working_set = reuses.working_set_bytes()
    longest = max(request.computed_token_count for request in requests)
    room = int(ROOM_TO_RUN * shape.running_bytes(longest, chunk_tokens))
    rows: list[Row] = []
    for load in sorted(loads):
        started = time.monotonic()
        pool_bytes = max(int(working_set / load), room)
        if rows and rows[-1]["load"] > working_set / room:
            print(f"{shape.name}, {workload}, load {load}: as the one before", file=sys.stderr)
            continue
        row: Row = {"shape": shape.name, "workload": workload, "load": load, "pool_mib": pool_bytes >> 20}
        row |= {"working_set_mib": working_set >> 20, "requests": len(requests)}
        row |= {"prompt_tokens": reuses.prompt_token_count}
        refused: dict[str, int] = {}
        for name in sides:
            if name == OPTIMUM:
                row[name] = round(optimum.hit_ratio_max(reuses, pool_bytes), 4)
            elif name in (AGES, AGES_BY_CLASS):
                bound = ages.hit_ratio_max(requests, shape, pool_bytes, has_classes=name == AGES_BY_CLASS)
                row[name] = round(bound, 4)
            elif name in LEARNED:
                learned = ages.hit_ratio_learned(others, requests, shape, pool_bytes, LEARNED[name]) if others else 0.0
                row[name] = round(learned, 4) if others else ""
            elif name == FULL and shape.state_bytes:
                row[name] = ""  # A state has no keys and values, so no pool of full attention can replace it.
            else:
                side = make_side(name, shape, pool_bytes, chunk_tokens)
                row[name] = round(sum(map(side.serve, requests)) / reuses.prompt_token_count, 4)
                refused[name] = side.refused_count
        row["endless"] = round(reuses.ratio, 4)
        row["refused"] = " ".join(f"{name}: {count}" for name, count in refused.items() if count)
        rows.append(row)
        passed = time.monotonic() - started
        print(f"{shape.name}, {workload}, load {load}: {passed:.1f} s", file=sys.stderr, flush=True)
    return rows


def chosen(options: argparse.Namespace, sides: Sequence[str]) -> list[Row]:
    """Returns the rows of all shapes, workloads and loads that the command line names."""
    scale = QUICK_SCALE if options.quick else FULL_SCALE
    shapes = {**all_shapes(), states_alone().name: states_alone()}
    rows = []
    for workload in options.workloads:
        if workload == TRACE and options.trace is None:
            print("the trace is left out: no --trace", file=sys.stderr)
            continue
        if workload == TRACE:
            samples = range(scale.session_share if set(LEARNED) & set(sides) else 1)
            requests, *others = [
                list(trace(options.trace, scale.session_share, scale.trace_tokens_max, sample)) for sample in samples
            ]
        else:
            requests, others = list(WORKLOADS[workload](scale)), []
        for name in options.shapes:
            rows += measure(
                shapes[name], workload, requests, options.loads, chunk_tokens=options.chunk, sides=sides, others=others
            )
    return rows


def drawn(options: argparse.Namespace, sides: Sequence[str]) -> list[Row]:
    """Returns a row for each drawn scenario, without the longest ones."""
    rows = []
    for number in range(options.random):
        scenario = draw(number, LOADS)
        requests = scenario.requests()
        if requests:
            (row,) = measure(
                scenario.shape,
                scenario.workload,
                requests,
                [scenario.load],
                chunk_tokens=options.chunk,
                sides=sides,
            )
            rows.append({"scenario": number, **row})
    return rows


def least(name: str, goal: float, rows: Sequence[Row], baseline: Callable[[Row], float]) -> Goal:
    """Returns the worst ratio of Quire's hits to the baseline's, and its place. Rows where the baseline hits nothing do
    not count."""
    ratios = [(row[QUIRE] / baseline(row), row) for row in rows if baseline(row)]
    if not ratios:
        return Goal(f"{name}: nothing to compare with", None, goal, "higher")
    value, row = min(ratios, key=lambda ratio: ratio[0])
    unmet = sum(ratio < goal for ratio, _ in ratios)
    number = f"scenario {row['scenario']}, " if "scenario" in row else ""
    where = f"{number}{row['shape']}, {row['workload']}, load {row['load']:g}"
    return Goal(f"{name}, least of {len(ratios)} ({unmet} below; least at {where})", value, goal, "higher")


def goals(rows: Sequence[Row], sides: Sequence[str]) -> list[Goal]:
    """Returns the goals of the measured sides."""
    promised: list[Goal] = []
    if QUIRE not in sides:
        return promised
    if set(VLLM) <= set(sides):
        promised.append(
            least("Quire over the better of vLLM's two", 1.0, rows, lambda row: max(row[name] for name in VLLM))
        )
    if OPTIMUM in sides:
        loaded = [row for row in rows if row["load"] == LOAD_OF_OPTIMUM_GOAL]
        promised.append(least("Quire over the optimum at load 1.5", 0.5, loaded, lambda row: float(row[OPTIMUM])))
    if FULL in sides:
        promised.append(least("Quire over full attention only", 1.0, rows, lambda row: float(row[FULL] or 0)))
    return promised


def main() -> None:
    """Measures everything, and prints or writes the report."""
    options = arguments()
    sides = usable_sides(options.sides)
    rows = drawn(options, sides) if options.random else chosen(options, sides)
    publish("Share of prompt tokens that hit", rows, goals(rows, sides), as_json=options.json, csv_file=options.csv)


if __name__ == "__main__":
    main()
