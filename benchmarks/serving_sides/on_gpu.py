"""The measurements of serving on a GPU, compared with the chip's limits. `serving.py --device cuda` and the GPU proof
use them.

    decode        tokens a second, beside the bound: bytes of weights and pages divided by the speed of a copy
    first token   its time for a single prompt, beside the bound: operations divided by the speed of a matrix product
    idle          share of the time between the starts of two passes in which the device computes none
    memory        blocks that fit, beside the number of `quire plan`
    profile       kernels of a turn, by their time

`decode` counts only the passes where all requests decode, timed on the device. Rows of `whole` rounds include prompts
and are timed at the client; their bound is the sum for prompts and passes.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from serving_sides.ceiling import Bounds
from serving_sides.models import weight_bytes
from serving_sides.probed_stack import Pass, ProbedStack, Round
from serving_sides.trace import Trace
from serving_sides.workload import KINDS, Workload

Row = dict[str, Any]
TOP_LINES = 20
PROFILED_S = 0.4
PROFILED_OUTPUT = 400  # tokens of each output: decode must outlast the trace
PROFILE_S = 15.0  # time limit for a profile
LONGEST = 5  # number of gaps between passes that a row lists, the longest first
MATTERS_MOST = 3  # number of `decode` workloads that are measured first


@dataclass(frozen=True, slots=True)
class Measurement:
    """The measurements of one run. The workloads run in this order while there is time.

    Attributes:
        decode: numbers of requests, tokens of each prompt, tokens of each output.
        first_tokens: lengths of single prompts.
        profiled: numbers of requests that decode during a trace, with prompts of the first `decode` workload's length.
        rounds: most rounds of each workload, after a warm-up.
    """

    decode: tuple[tuple[int, int, int], ...]
    first_tokens: tuple[int, ...]
    profiled: tuple[int, ...]
    rounds: int


ALL = Measurement(
    decode=((1, 512, 128), (32, 512, 128), (128, 512, 128), (256, 512, 128), (32, 4096, 128), (128, 4096, 64)),
    first_tokens=(4096, 32_768, 512),
    profiled=(32, 128, 1),
    rounds=2,
)
TINY = Measurement(decode=((1, 24, 16), (4, 24, 16)), first_tokens=(64,), profiled=(2,), rounds=1)


def measure(
    stack: ProbedStack, wanted: Measurement, bounds: Bounds, left_s: Callable[[], float], *, others_s: float
) -> Iterator[Row]:
    """Yields rows as they are measured. Measurements that would end too late are left out.

    Args:
        stack: a stack that serves.
        wanted: the measurements.
        bounds: the limits to compare with.
        left_s: returns the seconds left.
        others_s: seconds to reserve for other sides. With less time left, only the most important workloads are
            measured.

    Raises:
        TimeoutError: the worker did not answer in time.
    """
    decode = [partial(_decode, stack, each, wanted.rounds, bounds, left_s) for each in wanted.decode]
    first_tokens = [partial(_first_token, stack, each, wanted.rounds, bounds, left_s) for each in wanted.first_tokens]
    profiled = [partial(_profiled, stack, wanted, each, left_s) for each in (*wanted.profiled, None)]
    first = (*decode[:MATTERS_MOST], *first_tokens, *profiled)
    for number, step in enumerate((*first, *decode[MATTERS_MOST:])):
        if number >= len(first) and left_s() < others_s:
            return
        try:
            yield from step()
        except TimeoutError:  # No time is left for later parts, either.
            raise
        except Exception as error:  # A failed part must not lose the other parts' rows.
            yield {"measured": "nothing", "passed": False, "why": f"{type(error).__name__}: {error}"[:1000]}


def decode_rows(
    stack: ProbedStack, wanted: Measurement, bounds: Bounds, left_s: Callable[[], float], *, side: str
) -> Iterator[Row]:
    """Yields the most important rows of `decode`, under the name `side`. The other arguments are the same as for
    `measure`.
    """
    for sizes in wanted.decode[:MATTERS_MOST]:
        for row in _decode(stack, sizes, wanted.rounds, bounds, left_s):
            yield row | {"side": side}


def _decode(
    stack: ProbedStack, sizes: tuple[int, int, int], rounds_max: int, bounds: Bounds, left_s: Callable[[], float]
) -> Iterator[Row]:
    workload = Workload(KINDS[0], *sizes)
    # An estimate of a round's time: turns and prompts take at most about twice their bounds.
    needed_s = 2 * (sizes[0] * bounds.prompt_s(sizes[1]) + sizes[2] * bounds.decode_s(sizes[0], sizes[1]))
    rounds = _rounds(stack, workload, rounds_max, left_s, needed_s=needed_s)
    if rounds:
        yield decode_row(rounds, workload, bounds)


def _first_token(
    stack: ProbedStack, length: int, rounds_max: int, bounds: Bounds, left_s: Callable[[], float]
) -> Iterator[Row]:
    rounds = _rounds(stack, Workload(KINDS[0], 1, length, 1), rounds_max, left_s, needed_s=2 * bounds.prompt_s(length))
    if rounds:
        yield first_token_row(rounds, length, bounds)


def _rounds(
    stack: ProbedStack, workload: Workload, count: int, left_s: Callable[[], float], *, needed_s: float
) -> list[Round]:
    """Runs rounds after a warm-up, fewer if the time ends. Runs none if not even two would fit."""
    if left_s() < 3 * needed_s + 1:
        return []
    vocabulary = stack.status.vocabulary_size
    warm = stack.round(workload.draw(-1, vocabulary))
    print(f"{workload}: {warm.seconds:.2f} s, its first token {warm.first_token_s:.3f} s", flush=True)
    rounds: list[Round] = []
    for number in range(count):
        if left_s() < 1.5 * warm.seconds + 1 and rounds:
            break
        rounds.append(stack.round(workload.draw(number, vocabulary)))
    return rounds


def decode_row(rounds: list[Round], workload: Workload, bounds: Bounds) -> Row:
    """Returns the row of one workload: the times of its rounds, compared with its bounds."""
    count, prompt, output = workload.request_count, workload.prompt_tokens, workload.output_tokens
    pairs = [pair for each in rounds for pair in decoding_pairs(each.passes, count)]
    turn_ms, gpu_ms, idle = turn_of(pairs)
    seconds = statistics.median(each.seconds for each in rounds)
    pass_bound_s = bounds.decode_s(count, prompt + output // 2)
    whole_bound_s = count * bounds.prompt_s(prompt) + (output - 1) * pass_bound_s
    return {
        "measured": "decode",
        "side": "quire",
        "requests": count,
        "prompt_tokens": prompt,
        "output_tokens": output,
        "rounds": len(rounds),
        "turns": len(pairs),
        "turn_ms": turn_ms,
        "gpu_ms": gpu_ms,
        "idle_share": idle,
        "longest_idle": longest_idle([decoding_pairs(each.passes, count) for each in rounds]),
        "decode_tokens_per_s": None if turn_ms is None else round(1e3 * count / turn_ms, 1),
        "bound_tokens_per_s": round(count / pass_bound_s, 1),
        "share_of_bound": None if turn_ms is None else round(1e3 * pass_bound_s / turn_ms, 3),
        "replayed_share": _replayed_share(rounds, count),
        "whole_tokens_per_s": round(count * output / seconds, 1),
        "whole_share_of_bound": round(whole_bound_s / seconds, 3),
    }


def decoding_pairs(passes: list[Pass], count: int) -> list[tuple[Pass, Pass]]:
    """Returns pairs of successive passes if all requests decode in both."""
    return [(one, two) for one, two in pairwise(passes) if one["sequences"] == one["tokens"] == two["tokens"] == count]


def turn_of(pairs: list[tuple[Pass, Pass]]) -> tuple[float | None, float | None, float | None]:
    """Returns the median milliseconds of a turn and of the device's work in it, and the device's idle share of the
    turns' time; None without turns."""
    if not pairs:
        return None, None, None
    turns_ms = [two["begin_ms"] - one["begin_ms"] for one, two in pairs]
    computing_ms = [one["end_ms"] - one["begin_ms"] for one, _ in pairs]
    idle = 1 - sum(computing_ms) / sum(turns_ms)
    return round(statistics.median(turns_ms), 3), round(statistics.median(computing_ms), 3), round(idle, 4)


def longest_idle(rounds: list[list[tuple[Pass, Pass]]]) -> list[dict[str, float]]:
    """Returns the five longest gaps between two passes of all rounds: round, turn, length, and events during the gap
    that may have delayed the model's thread (`probed_worker.grown`)."""
    idle: list[dict[str, float]] = [
        {
            "round": number,
            "turn": turn,
            "ms": round(two["begin_ms"] - one["end_ms"], 3),
            "pinned_blocks": two["pinned_blocks"] - one["pinned_blocks"],
            "collections": two["collections"] - one["collections"],
        }
        for number, pairs in enumerate(rounds)
        for turn, (one, two) in enumerate(pairs)
    ]
    return sorted(idle, key=lambda each: each["ms"], reverse=True)[:LONGEST]


def _replayed_share(rounds: list[Round], count: int) -> float:
    decoding = [one for each in rounds for one in each.passes if one["sequences"] == one["tokens"] == count]
    return round(sum(one["kind"] == "replayed" for one in decoding) / max(1, len(decoding)), 2)


def first_token_row(rounds: list[Round], length: int, bounds: Bounds) -> Row:
    """Returns the time of a prompt's first token, compared with its bound."""
    seconds = statistics.median(each.first_token_s for each in rounds)
    computing = statistics.median(sum(one["end_ms"] - one["begin_ms"] for one in each.passes) for each in rounds)
    bound_s = bounds.prompt_s(length)
    return {
        "measured": "first token",
        "side": "quire",
        "requests": 1,
        "prompt_tokens": length,
        "rounds": len(rounds),
        "first_token_ms": round(1e3 * seconds, 2),
        "in_passes_ms": round(computing, 2),
        "passes": len(rounds[-1].passes),
        "bound_ms": round(1e3 * bound_s, 2),
        "share_of_bound": round(bound_s / seconds, 3),
    }


def _profiled(stack: ProbedStack, wanted: Measurement, count: int | None, left_s: Callable[[], float]) -> Iterator[Row]:
    """Yields the kernels of turns with `count` decoding requests; with None, the kernels of a prompt's chunk."""
    if left_s() < PROFILE_S:
        return
    prompt = wanted.decode[0][1]
    if count is None:
        title, workload = f"prompt of {wanted.first_tokens[0]}", Workload(KINDS[0], 1, wanted.first_tokens[0], 1)
        after_s = -1.0
    else:
        title, workload = f"decode of {count}", Workload(KINDS[0], count, prompt, PROFILED_OUTPUT)
        after_s = 0.2 + 0.03 * count * prompt / 512  # twice the time of all prompts, at 15 ms for 512 tokens
    requests = workload.draw(-2, stack.status.vocabulary_size)
    trace, passes = stack.profile(requests, after_s=after_s, seconds=PROFILED_S)
    yield from profile_rows(title, trace, max(1, len(passes)))


def profile_rows(title: str, trace: Trace, turns: int) -> Iterator[Row]:
    """Yields a row for the whole trace and one for each of its longest kernels. Times are averages per turn."""
    total_ms = sum(line.ms for line in trace.lines)
    idle = trace.idle_share
    yield {
        "measured": "profile",
        "of": title,
        "turns": turns,
        "span_ms": round(trace.span_ms / turns, 3),
        "busy_ms": round(trace.busy_ms / turns, 3),
        "idle_share": None if idle is None else round(idle, 4),
        "launches": round(trace.launch_count / turns, 1),
        "kernels": round(sum(line.count for line in trace.lines) / turns, 1),
    }
    for line in trace.lines[:TOP_LINES]:
        yield {
            "measured": "kernel",
            "of": title,
            "kernel": line.kernel,
            "count": round(line.count / turns, 1),
            "ms": round(line.ms / turns, 4),
            "share": round(line.ms / total_ms, 4),
        }


def memory_row(stack: ProbedStack, model: Path, total_bytes: int, utilization: float, block_size: int) -> Row:
    """Returns the number of blocks that fit, compared with the number of `quire plan`, which reads only the
    configuration.
    """
    command = [sys.executable, "-m", "quire.cli", "plan", str(model), "--memory", f"{total_bytes}B", "--json"]
    command += ["--worker", "--utilization", str(utilization), "--block-size", str(block_size)]
    command += ["--weights", f"{weight_bytes(model)}B"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    row: Row = {
        "measured": "memory",
        "blocks": stack.status.block_count,
        "block_bytes": stack.status.block_bytes,
        "tokens": stack.status.block_count * stack.status.block_size,
        "start_s": round(stack.start_s, 1),
    }
    if done.returncode:
        return row | {"passed": False, "why": done.stderr.strip()[-500:]}
    planned = json.loads(done.stdout)["memory"]["block_count"]
    return row | {"planned_blocks": planned, "of_plan": round(stack.status.block_count / planned, 4)}
