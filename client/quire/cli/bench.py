"""`quire bench`: puts a short load on a running worker, and reports the times that its callers measured."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import math
import secrets
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import StrEnum
from typing import Annotated, Any, Final, TypeAlias

import typer
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from quire import AsyncClient
from quire._transport.channel import GENERATE_TIMEOUT_S
from quire.cli import options, output
from quire.cli.load import Conversation, Load, LoadShape, Outcome, drawn
from quire.cli.prompts import content
from quire.errors import UsageError
from quire.sampling import SamplingParams

EXAMPLES = """Put a short load on a worker, and report the latency and throughput that its callers see.

Prompts are random tokens.
The first request warms the worker up and is not measured.
A run never hits what an earlier run left in the cache.
With --rate, latency counts from when a request was due, even if it had to wait for --concurrency.
The exit code is 1 if a request failed.

Examples:

    quire bench
    quire bench --workload chats --turns 6 --requests 120
    quire bench --workload distinct --prompt-tokens 1000 --output-tokens 100 --rate 4
    quire bench --file prompts.jsonl --concurrency 16 --json

A line of a file is a prompt, or a JSON object with `prompt` or `messages`.
"""
FilePrompt: TypeAlias = str | list[dict[str, Any]]
PERCENTILES: Final = (50, 90, 99)
_ROWS: Final = (
    ("first token", "first_token_s"),
    ("each further token", "token_s"),
    ("pause between pieces", "pause_s"),
    ("whole answer", "answer_s"),
)


class Workload(StrEnum):
    """The kind of load: what its prompts have in common."""

    SHARED = "shared"
    DISTINCT = "distinct"
    CHATS = "chats"


def register(app: typer.Typer) -> None:
    """Adds the command to the application."""
    app.command(help=EXAMPLES)(bench)


@options.connects
def bench(
    *,
    requests: Annotated[
        int | None,
        typer.Option(min=1, max=1_000_000, help="Default: 64, or one per line of --file."),
    ] = None,
    concurrency: Annotated[int, typer.Option(min=1, max=4_096, help="Maximum number of requests at a time.")] = 8,
    rate: Annotated[
        float | None,
        typer.Option(min=0.001, max=1e6, help="Requests (or conversations) per second, at random times."),
    ] = None,
    workload: Annotated[
        Workload,
        typer.Option(help="Kind of load: prompts with a common prefix, without one, or chats."),
    ] = Workload.SHARED,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a prompt, or of a turn of a chat.")] = 256,
    shared_tokens: Annotated[
        int | None, typer.Option(min=0, help="Tokens that all prompts share. Default: three quarters.")
    ] = None,
    output_tokens: Annotated[int, typer.Option(min=1, help="Tokens of an answer.")] = 32,
    turns: Annotated[int, typer.Option(min=2, max=1_000, help="Turns of a chat.")] = 4,
    file: Annotated[str | None, typer.Option(metavar="PATH", help="File of prompts to send instead.")] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Seed of all random choices.")] = 1,
    namespace: Annotated[str, typer.Option(help="Namespace of the requests; only these share prefixes.")] = "",
    adapter: Annotated[str, typer.Option(metavar="NAME", help="A LoRA adapter that the worker has loaded.")] = "",
    worker: options.Worker = options.WORKER,
    timeout: options.Timeout = GENERATE_TIMEOUT_S,
    as_json: options.Json = False,
    credentials: options.Credentials,
) -> None:
    """Sends the load and prints the report."""
    shape = _shape(workload, prompt_tokens, shared_tokens, turns)
    prompts = None if file is None else _read(file)
    count = requests or (64 if prompts is None else len(prompts))
    params = SamplingParams(max_tokens=output_tokens, ignore_eos=True, seed=seed)

    async def measured() -> tuple[list[Outcome], float]:
        async with AsyncClient(worker, token=credentials.token, tls=credentials.tls) as client:
            status = await client.status()
            if prompts is None:
                _require_room(shape, output_tokens, status.sequence_tokens_max)
                conversations = drawn(shape, count, status.vocabulary_size, seed)
            else:
                conversations = itertools.islice(itertools.cycle(await _tokenized(client, prompts)), count)
            load = Load(
                client, params, concurrency=concurrency, rate=rate, seed=seed, salt=secrets.token_hex(8),
                namespace=namespace, adapter=adapter, timeout_s=timeout,
            )  # fmt: skip
            first = drawn(LoadShape(min(shape.prompt_tokens, 16)), 1, status.vocabulary_size, seed + 1)
            await load.run(first, lambda _outcome: None)
            outcomes, since_s = list[Outcome](), time.monotonic()
            with _progress(count) as advance:

                def add(outcome: Outcome) -> None:
                    outcomes.append(outcome)
                    advance()

                await load.run(conversations, add)
            return outcomes, time.monotonic() - since_s

    try:
        outcomes, seconds = asyncio.run(measured())
    except KeyboardInterrupt:
        sys.exit(output.INTERRUPTED)
    report = {"workload": workload.value if file is None else file, **reported(outcomes, seconds)}
    if as_json:
        output.print_json(report)
    else:
        _print(report)
    if report["failed"]:
        sys.exit(output.FAILED)


def _shape(workload: Workload, prompt_tokens: int, shared_tokens: int | None, turns: int) -> LoadShape:
    if workload is not Workload.SHARED:
        return LoadShape(prompt_tokens, turns=turns if workload is Workload.CHATS else 1)
    shared_tokens = prompt_tokens * 3 // 4 if shared_tokens is None else shared_tokens
    if shared_tokens >= prompt_tokens:
        raise UsageError(f"--shared-tokens {shared_tokens} must be fewer than --prompt-tokens {prompt_tokens}")
    return LoadShape(prompt_tokens, shared_tokens)


def _require_room(shape: LoadShape, output_tokens: int, room: int) -> None:
    """Raises UsageError if the last turn of a conversation would not fit a sequence of the worker."""
    own = shape.prompt_tokens - shape.shared_tokens
    needed = shape.shared_tokens + shape.turns * (own + output_tokens)
    if needed > room:
        raise UsageError(
            f"{needed:,} tokens of prompt and answer do not fit the worker's {room:,}: "
            "give fewer --prompt-tokens, --output-tokens or --turns"
        )


def _read(file: str) -> list[FilePrompt]:
    """Returns the prompts and conversations of a file."""
    lines = content("file", f"@{file}").splitlines()
    found = [_prompt(line, f"--file: line {number} of {file}") for number, line in enumerate(lines, 1) if line.strip()]
    if not found:
        raise UsageError(f"--file: {file} has no prompts")
    return found


def _prompt(line: str, where: str) -> FilePrompt:
    if not line.startswith("{"):
        return line
    try:
        value = json.loads(line)
    except ValueError as error:
        raise UsageError(f"{where} is not JSON: {error}") from None
    prompt, messages = value.get("prompt"), value.get("messages")
    if isinstance(prompt, str) and prompt:
        return prompt
    if isinstance(messages, list) and messages and all(isinstance(each, dict) for each in messages):
        return messages
    raise UsageError(f"{where} needs a text as `prompt` or a list as `messages`")


async def _tokenized(client: AsyncClient, prompts: Sequence[FilePrompt]) -> list[Conversation]:
    return [[await client.tokenize(prompt)] for prompt in prompts]


@contextlib.contextmanager
def _progress(count: int) -> Iterator[Callable[[], None]]:
    """Shows the number of ended requests if standard error is a terminal. Yields a function to call after each."""
    console = Console(stderr=True)
    columns = TextColumn("requests"), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as shown:
        task = shown.add_task("requests", total=count)
        yield lambda: shown.advance(task)


def reported(outcomes: Sequence[Outcome], seconds: float) -> dict[str, Any]:
    """Returns the report in tokens and seconds. Times cover only successful requests."""
    good = [outcome for outcome in outcomes if not outcome.error]
    prompt = sum(outcome.prompt_token_count for outcome in good)
    cached = sum(outcome.cached_token_count for outcome in good)
    generated = sum(len(outcome.token_ids) for outcome in good)
    return {
        "request_count": len(outcomes),
        "failed": dict(Counter(outcome.error for outcome in outcomes if outcome.error)),
        "seconds": seconds,
        "requests_per_s": len(good) / seconds,
        "output_tokens_per_s": generated / seconds,
        "prompt_token_count": prompt,
        "cached_token_count": cached,
        "output_token_count": generated,
        "preemption_count": sum(outcome.preemption_count for outcome in good),
        "first_token_s": _spread(outcome.first_s for outcome in good),
        "token_s": _spread(outcome.token_s for outcome in good),
        "pause_s": _spread(itertools.chain.from_iterable(outcome.pauses_s for outcome in good)),
        "answer_s": _spread(outcome.total_s for outcome in good),
    }


def _spread(values: Iterable[float | None]) -> dict[str, float] | None:
    """Returns mean, percentiles (nearest rank) and maximum, or None without values."""
    ordered = sorted(value for value in values if value is not None)
    if not ordered:
        return None
    ranks = {f"p{each}": ordered[math.ceil(len(ordered) * each / 100) - 1] for each in PERCENTILES}
    return {"mean": statistics.fmean(ordered), **ranks, "max": ordered[-1]}


def _print(report: dict[str, Any]) -> None:
    failed = sum(report["failed"].values())
    share = report["cached_token_count"] / report["prompt_token_count"] if report["prompt_token_count"] else 0.0
    print(
        f"{report['request_count'] - failed:,} requests in {report['seconds']:.2f} s ({report['workload']}): "
        f"{report['requests_per_s']:,.1f} requests/s, {report['output_tokens_per_s']:,.0f} tokens/s\n"
        f"{report['prompt_token_count']:,} tokens of prompts, {share:.0%} of them cached; "
        f"{report['output_token_count']:,} generated; {report['preemption_count']:,} preemptions"
    )
    table = Table(box=None, pad_edge=False)
    table.add_column("milliseconds")
    for name in ("mean", *(f"p{each}" for each in PERCENTILES), "max"):
        table.add_column(name, justify="right")
    for title, key in _ROWS:
        spread = report[key]
        table.add_row(title, *(f"{1000 * value:,.1f}" for value in (spread or {}).values()))
    output.console().print(table)
    for reason, count in report["failed"].items():
        print(f"{count:,} failed: {reason}")
