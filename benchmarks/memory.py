"""Wasted memory of the KV cache, and how many sequences of hybrid models fit into it.

Waste is the share of allocated slots that are unwritten or padding, in every turn of a worker that serves a trace of
requests. The worker's scheduler and the allocator's pool take part, with slots granted ahead of need. A second figure
has the same requests at the same moments, each with a contiguous reservation of the longest sequence.

The planner lays out the pages of hybrid models, and sequences fill the pool until one is refused. The comparison treats
every layer, including layers with states, as full attention that keeps every token. The worker's own tensors for these
shapes are compared with the plan, byte by byte.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from hybrid_sides.shapes import Shape, all_shapes
from memory_sides.hybrids import PASS_TOKENS, fitting, tensors
from memory_sides.traffic import Slots, TraceRequest, Traffic, read_trace
from quire.planning import plan_layout
from report import Goal, add_output_arguments, publish

WASTE_GOAL = 0.04
SHAPES = ("gpt-oss-20b", "gemma-3-27b", "bamba", "qwen3-next")
TENSOR_BLOCKS = 1_000


def arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--trace", type=Path, default=Path("../shared/traces/conversation_trace.jsonl"),
        help="file of requests, one line of JSON per request (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--requests", type=int, default=300, help="use the first requests of the trace (default: %(default)s)"
    )
    parser.add_argument("--block-sizes", type=int, nargs="+", default=[16], metavar="TOKENS")
    parser.add_argument("--running", type=int, nargs="+", default=[16, 64], help="most samples at a time")
    parser.add_argument(
        "--memory-gib", type=int, default=24, help="memory for the pages of hybrid models (default: %(default)s)"
    )
    parser.add_argument("--lengths", type=int, nargs="+", default=[8_192, 32_768], metavar="TOKENS")
    add_output_arguments(parser)
    return parser.parse_args()


def waste_row(requests: Sequence[TraceRequest], *, block_size: int, running_max: int) -> dict[str, object]:
    """Serves the trace once. Returns shares over all turns, and in the worst turn with at least half of the samples
    running."""
    longest = max(request.input_length + request.output_length for request in requests)
    block_count = 16_000 * running_max // block_size + longest // block_size
    turns: list[Slots] = []
    for slots in Traffic(requests, block_count=block_count, block_size=block_size, running_max=running_max).run():
        if slots.running_count:
            turns.append(slots)
    held, tokens = sum(turn.held for turn in turns), sum(turn.token_count for turn in turns)
    reserved = longest * sum(turn.running_count for turn in turns)
    busy = [turn for turn in turns if 2 * turn.running_count >= running_max]
    return {
        "part": "trace",
        "case": f"blocks of {block_size}, {running_max} at a time",
        "length": longest,
        "quire": sum(turn.unwritten for turn in turns) / held,
        "quire_worst": max((turn.unwritten / turn.held for turn in busy), default=None),
        "beside": 1 - tokens / reserved,
        "beside_is": "contiguous reservation of the longest",
        "samples": median(turn.running_count for turn in turns),
        "detail": f"{len(requests)} requests, {len(turns)} turns",
    }


def hybrid_row(shape: Shape, memory_bytes: int, token_count: int) -> dict[str, object]:
    """Fills a pool with sequences of one length; returns how many fit."""
    layout = plan_layout(shape.layers)
    found = fitting(shape, layout, memory_bytes, token_count)
    return {
        "part": "hybrid",
        "case": shape.name,
        "length": token_count,
        "quire": found.paged,
        "quire_worst": layout.padding_share(token_count),
        "beside": found.full_attention,
        "beside_is": "all layers full attention",
        "samples": found.planned,
        "detail": f"{memory_bytes >> 30} GiB, {layout.group_count} groups, passes of {PASS_TOKENS}",
    }


def tensor_row(shape: Shape) -> tuple[dict[str, object], Goal]:
    """Compares the worker's tensors with the plan; returns a row and a goal."""
    name = f"bytes of {shape.name}'s tensors beside the plan's, difference"
    row: dict[str, object] = {"part": "tensors", "case": shape.name, "length": TENSOR_BLOCKS}
    found = tensors(shape, TENSOR_BLOCKS)
    row |= {
        "quire": found.buffers,
        "quire_worst": found.layers_differ,
        "beside": found.planned,
        "beside_is": "planned bytes",
        "samples": None,
        "detail": f"{len(shape.layers)} layers, blocks on the meta device",
    }
    return row, Goal(name, abs(found.buffers - found.planned) + found.layers_differ, 0, "lower")


def main() -> None:
    """Measures all parts and reports them."""
    options = arguments()
    requests = read_trace(options.trace, options.requests)
    rows, goals = [], []
    for block_size in options.block_sizes:
        for running_max in options.running:
            row = waste_row(requests, block_size=block_size, running_max=running_max)
            rows.append(row)
            share = row["quire"]
            assert isinstance(share, float)
            goals.append(Goal(f"waste, {row['case']}", share, WASTE_GOAL, "lower"))
    shapes = all_shapes()
    for name in SHAPES:
        for length in options.lengths:
            row = hybrid_row(shapes[name], options.memory_gib << 30, length)
            rows.append(row)
            paged, beside, planned = row["quire"], row["beside"], row["samples"]
            assert isinstance(paged, int)
            assert isinstance(beside, int)
            assert isinstance(planned, int)
            goals.append(
                Goal(f"{name}, {length} tokens: sequences over full attention only", paged / beside, 1.0, "higher")
            )
            goals.append(Goal(f"{name}, {length} tokens: sequences over the planner's", paged / planned, 1.0, "higher"))
    for name in SHAPES:
        row, goal = tensor_row(shapes[name])
        rows.append(row)
        goals.append(goal)
    publish("KV memory", rows, goals, as_json=options.json, csv_file=options.csv)


if __name__ == "__main__":
    main()
