"""Gain and cost of speculative decoding: prompt lookup and draft models, compared with plain decoding.

The served model is the demo model with more layers that add nothing (`--layers`): it has the demo model's texts at a
multiple of its cost. Each side is a worker with one thread of torch. The script runs `--repeat` rounds after a warm-up
and prints medians. The sides:

    plain            no drafts
    lookup           `--prompt-lookup-min 2 --prompt-lookup-max 5`
    draft: same      the demo model drafts; it always agrees with the served model, the best case for a draft model
    draft: shallow   the first half of the demo model's layers drafts; it is sometimes right

The texts, as many at once as the row says:

    open     greedy continuations of six beginnings of documentation
    drawn    the same with a temperature of 1, which agrees less often with the likeliest token
    quoted   answers that must repeat their prompts (`choice`): the best case for a lookup

Acceptance is accepted tokens divided by drafted tokens, as the worker counts them. Texts are compared with plain
decoding's texts. Texts may differ where two tokens are nearly equally likely, because sums are computed in another
order.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from report import Goal, add_output_arguments, publish
from serving_sides.models import DEMO
from speculation_sides.checkpoints import make_deep, make_shallow
from speculation_sides.worker import Ask, Round, SpeculatingWorker

BEGINNINGS = (
    "The for statement is used to",
    "Return a new list containing",
    "This module provides",
    "If the file does not exist,",
    "An exception is raised when the",
    "The with statement wraps the execution of",
)
TEXT_TOKENS = 96
SHALLOW_LAYERS = 2  # number of layers of the shallow draft model; the demo model has 4
LOOKUP = ("--prompt-lookup-min", "2", "--prompt-lookup-max", "5")


def arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=32, help="layers of the served model (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=4, help="tokens drafted for each sample (default: %(default)s)")
    parser.add_argument("--at-once", type=int, nargs="+", default=[1, 6], help="texts at once (default: 1 and 6)")
    parser.add_argument("--repeat", type=int, default=3, help="rounds (default: %(default)s)")
    parser.add_argument("--text-tokens", type=int, default=TEXT_TOKENS, help="tokens of a text (default: %(default)s)")
    add_output_arguments(parser)
    options = parser.parse_args()
    if options.layers < 4 or not 1 <= options.tokens <= 64 or options.repeat < 1:
        parser.error("--layers must be at least 4, --tokens from 1 to 64, and --repeat at least 1")
    if not all(1 <= count <= len(BEGINNINGS) for count in options.at_once):
        parser.error(f"--at-once must be from 1 to {len(BEGINNINGS)}")
    return options


def sides_of(options: argparse.Namespace, folder: Path) -> dict[str, list[str]]:
    """Returns the additional options of the worker for each side."""
    drafts = ["--speculative-tokens", str(options.tokens)]
    shallow = make_shallow(folder / "shallow", SHALLOW_LAYERS)
    return {
        "plain": [],
        "lookup": [*drafts, *LOOKUP],
        "draft: same": [*drafts, "--draft-model", str(DEMO)],
        "draft: shallow": [*drafts, "--draft-model", str(shallow)],
    }


def workloads_of(worker: SpeculatingWorker, text_tokens: int) -> dict[str, list[Ask]]:
    """Returns the requests of each workload."""
    beginnings = [worker.tokenize(text) for text in BEGINNINGS]
    greedy = worker.run([Ask(tokens, {"max_tokens": text_tokens}) for tokens in beginnings], "texts").texts
    passages = [worker.detokenize(tokens) for tokens in greedy]
    return {
        "open": [Ask(tokens, {"max_tokens": text_tokens}) for tokens in beginnings],
        "drawn": [Ask(tokens, {"max_tokens": text_tokens, "temperature": 1.0}) for tokens in beginnings],
        "quoted": [
            Ask(worker.tokenize(passage), {"max_tokens": 2 * text_tokens, "choice": (passage,)}) for passage in passages
        ],
    }


def measure(worker: SpeculatingWorker, asks: Sequence[Ask], repeat: int, name: str) -> list[Round]:
    """Runs rounds after a warm-up, each in its own namespace."""
    found = [worker.run(asks, f"{name} {number}") for number in range(-1, repeat)]
    return found[1:]


def row_of(
    side: str, workload: str, rounds: Sequence[Round], plain: Sequence[tuple[int, ...]], speed: float | None
) -> dict[str, Any]:
    """Returns the printed row of a side. `speed` is plain decoding's tokens per second."""
    seconds = statistics.median(each.seconds for each in rounds)
    texts, drafted = rounds[-1].texts, sum(each.drafted for each in rounds)
    per_second = sum(map(len, texts)) / seconds
    return {
        "workload": workload,
        "at_once": len(texts),
        "side": side,
        "tokens_per_s": round(per_second, 1),
        "over_plain": round(per_second / (speed or per_second), 3),
        "acceptance": round(sum(each.accepted for each in rounds) / drafted, 3) if drafted else "",
        "drafted_per_token": round(drafted / len(rounds) / sum(map(len, texts)), 3),
        "same_texts": f"{sum(mine == theirs for mine, theirs in zip(texts, plain, strict=True))}/{len(texts)}",
    }


def main() -> None:
    """Measures all sides of every workload."""
    options = arguments()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = make_deep(Path(temporary) / "deep", options.layers)
        workloads: dict[str, list[Ask]] = {}
        texts: dict[tuple[str, int], list[tuple[int, ...]]] = {}
        speeds: dict[tuple[str, int], float] = {}
        for side, command in sides_of(options, Path(temporary)).items():
            with SpeculatingWorker(folder, command) as worker:
                workloads = workloads or workloads_of(worker, options.text_tokens)
                for workload, asks in workloads.items():
                    for count in options.at_once:
                        rounds = measure(worker, asks[:count], options.repeat, f"{workload} {count}")
                        key = workload, count
                        plain = texts.setdefault(key, rounds[-1].texts)
                        rows.append(row_of(side, workload, rounds, plain, speeds.get(key)))
                        speeds.setdefault(key, rows[-1]["tokens_per_s"])
    rows.sort(key=lambda row: (list(workloads).index(row["workload"]), row["at_once"]))
    same = [row["over_plain"] for row in rows if row["side"] == "draft: same" and row["workload"] == "open"]
    goals = [Goal("open: tokens/s with a draft model that agrees over plain", min(same), 1.0, "higher")]
    title = f"speculation on the demo model with {options.layers} layers, {options.tokens} tokens drafted"
    publish(title, rows, goals, as_json=options.json, csv_file=options.csv)


if __name__ == "__main__":
    main()
