"""Cost of the features that agents use: tools, reasoning, and turns through `previous_response_id`.

Three gateways share one worker: one passes answers on as text, one looks for tool calls, and one separates reasoning.
All gateways get the same streamed chat with the same number of greedy tokens, alternately. Each round begins with
another gateway. Ratios and differences are medians over the rounds. A difference in microseconds a token is the same
for models of any size. The turns continue one chat, and its answers are still in the pages. Each row has the tokens
that the turn computed, and the turn's own new tokens, from the usage of its response.
"""

from __future__ import annotations

import argparse
import http.client
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

from gateway import name_all_tokens
from quire import Client
from quire.local import LocalStack, ServerProcess
from report import Goal, add_output_arguments, publish
from serving_sides.models import DEMO, make_llama_32m

COST_MAX: Final = 0.02  # highest cost of a feature, as a share of the tokens per second
TOOL: Final = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
SIDES: Final[dict[str, tuple[list[str], dict[str, Any]]]] = {
    "text": ([], {}),
    "tools": (["--tool-call-format", "hermes"], {"tools": [TOOL], "tool_choice": "auto"}),
    "reasoning": (["--reasoning-format", "think"], {}),
}
Row = dict[str, Any]


def arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo", help="`demo` or `llama-32m` (random weights) (default: %(default)s)")
    parser.add_argument(
        "--output-tokens", type=int, default=256, help="tokens of a chat's answer (default: %(default)s)"
    )
    parser.add_argument("--repeat", type=int, default=25, help="rounds of chats (default: %(default)s)")
    parser.add_argument("--turns", type=int, default=4, help="turns that continue a response (default: %(default)s)")
    add_output_arguments(parser)
    options = parser.parse_args()
    if min(options.output_tokens, options.repeat, options.turns) < 1:
        parser.error("counts must be at least 1")
    return options


def model_of(name: str, folder: Path) -> Path:
    """Returns the folder of a model that has a text for each token. One token ends an answer: structured output needs
    it.
    """
    if name == "demo":
        return DEMO
    make_llama_32m(folder)
    name_all_tokens(folder)
    shutil.copy(DEMO / "chat_template.jinja", folder)
    for file in (folder / "config.json", folder / "generation_config.json"):
        file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token_id": 0}))
    return folder


@contextmanager
def gateway(worker: str, folder: Path, extra: list[str]) -> Iterator[ServerProcess]:
    """Serves a gateway for a worker."""
    folder.mkdir()
    command = ["--listen", "127.0.0.1:0", "--worker", worker, "--log-requests", "none", *extra]
    process = ServerProcess("quire_gateway", command, folder=folder, log=folder / "log")
    try:
        process.wait_ready(deadline=time.monotonic() + 120)
        yield process
    finally:
        process.stop()


def post(process: ServerProcess, path: str, body: dict[str, Any]) -> bytes:
    """Returns a whole answer.

    Raises:
        RuntimeError: the gateway refused.
    """
    host, _, port = process.address.rpartition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=120)
    connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
    answer = connection.getresponse()
    data = answer.read()
    connection.close()
    if answer.status != http.client.OK:
        raise RuntimeError(f"the gateway answers {answer.status}: {data[:300]!r}")
    return data


def cpu_s(process: ServerProcess) -> float:
    """Returns the processor time of a process, as Linux counts it."""
    tasks = Path(f"/proc/{process.process.pid}/task").glob("*/schedstat")
    return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9


def chats(gateways: dict[str, ServerProcess], worker: ServerProcess, options: argparse.Namespace) -> list[Row]:
    """Returns a row for each gateway: its rate, the processor time of both servers, and their ratios to plain text."""
    rates: dict[str, list[float]] = {side: [] for side in gateways}
    work: dict[str, list[float]] = {side: [] for side in gateways}
    of_worker: dict[str, list[float]] = {side: [] for side in gateways}
    ask = {"messages": [{"role": "user", "content": "The for statement"}], "max_tokens": options.output_tokens}
    ask |= {"temperature": 0, "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}
    for number in range(-1, options.repeat):
        first = number % len(gateways)
        for side, process in [*gateways.items()][first:] + [*gateways.items()][:first]:
            before_s, worker_s, started_s = cpu_s(process), cpu_s(worker), time.perf_counter()
            last = post(process, "/v1/chat/completions", ask | SIDES[side][1]).split(b"data: ")[-2]
            seconds, count = time.perf_counter() - started_s, json.loads(last)["usage"]["completion_tokens"]
            if count != options.output_tokens:
                raise RuntimeError(f"{side}: the answer had {count} tokens instead of {options.output_tokens}")
            if number >= 0:  # The first chat with each gateway is a warm-up.
                rates[side].append(count / seconds)
                work[side].append((cpu_s(process) - before_s) / count * 1e6)
                of_worker[side].append((cpu_s(worker) - worker_s) / count * 1e6)
    return [
        {
            "model": options.model,
            "what": side,
            "tokens_per_s": round(statistics.median(rates[side]), 1),
            "rate_over_text": round(_ratio(rates[side], rates["text"]), 3),
            "added_us_per_token": round(_added(*([1e6 / rate for rate in rates[name]] for name in (side, "text"))), 1),
            "gateway_us_per_token": round(statistics.median(work[side]), 1),
            "gateway_added_us": round(_added(work[side], work["text"]), 1),
            "worker_us_per_token": round(statistics.median(of_worker[side]), 1),
            "worker_added_us": round(_added(of_worker[side], of_worker["text"]), 1),
            "tail_tokens": "",
            "computed_tokens": "",
        }
        for side in gateways
    ]


def _added(mine: list[float], theirs: list[float]) -> float:
    return statistics.median(own - other for own, other in zip(mine, theirs, strict=True))


def _ratio(mine: list[float], theirs: list[float]) -> float:
    return statistics.median(own / other for own, other in zip(mine, theirs, strict=True))


def turns(process: ServerProcess, model: str, count: int) -> list[Row]:
    """Returns a row for each turn of a chat. Every turn continues the previous response."""
    rows: list[Row] = []
    ask = {"input": "The for statement. " * 16, "max_output_tokens": 100, "temperature": 0}
    said = json.loads(post(process, "/v1/responses", ask))
    for number in range(count):
        ask |= {"input": "What is a sequence?", "previous_response_id": said["id"]}
        following = json.loads(post(process, "/v1/responses", ask))
        usage = following["usage"]
        rows.append(
            {
                "model": model,
                "what": f"turn {number + 1}",
                "tail_tokens": usage["input_tokens"] - said["usage"]["total_tokens"],
                "computed_tokens": usage["input_tokens"] - usage["input_tokens_details"]["cached_tokens"],
            }
        )
        said = following
    return rows


def main() -> None:
    """Measures, and prints or writes the report."""
    options = arguments()
    with tempfile.TemporaryDirectory() as made, ExitStack() as cleanup:
        served = model_of(options.model, Path(made) / "model")
        stack = cleanup.enter_context(LocalStack(served, worker_arguments=["--blocks", "512"]))
        with Client(stack.worker_address) as worker:
            block_size = worker.status().block_size
        gateways = {
            side: cleanup.enter_context(gateway(stack.worker_address, Path(made) / side, extra))
            for side, (extra, _) in SIDES.items()
        }
        assert stack.worker is not None
        rows = chats(gateways, stack.worker, options)
        print("chats: measured", file=sys.stderr)
        continued = turns(gateways["text"], options.model, options.turns)
    goals = [
        Goal(
            f"{options.model}: tokens/s of a chat with {row['what']} over text",
            row["rate_over_text"],
            1 - COST_MAX,
            "higher",
        )
        for row in rows[1:]
    ]
    beyond = max(row["computed_tokens"] - row["tail_tokens"] for row in continued)
    goals.append(Goal(f"{options.model}: tokens that a turn computes beyond its tail", beyond, block_size, "lower"))
    rows += [dict.fromkeys(rows[0], "") | row for row in continued]
    publish("The gateway for agents", rows, goals, as_json=options.json, csv_file=options.csv)


if __name__ == "__main__":
    main()
