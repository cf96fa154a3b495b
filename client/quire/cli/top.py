"""`quire top`: shows pools, workers, requests and namespaces, live."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Annotated, Any, Final

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from quire import Allocator, Client
from quire.cli import options, output
from quire.cli.pool_usage import repr_of
from quire.cli.readings import PoolReading, Reader, Reading, WorkerReading
from quire.cli.requests import state_of, why
from quire.views import RequestInfo, RequestState

EXAMPLES = """Watch pools, workers, namespaces and requests. Ctrl-C ends it.

Into a pipe, and with --json, it prints one picture after --interval, and rates are for that time.

Examples:

    quire top
    quire top --worker 10.0.0.5:7071 --worker 10.0.0.6:7071 --allocator 10.0.0.4:7070
    quire top --json
"""
BAR: Final = 10  # characters
WIDE: Final = 80  # terminal columns that fit every column of the table
_TEXTS: Final = {"worker", "model", "pool", "", "namespace", "request", "state", "waits for"}
_FOR_WIDE: Final = {"model", "", "empty", "saved", "evicted/s", "prefill/s", "preempted", "blocks", "cached"}

Workers = Annotated[
    list[str] | None,
    typer.Option("--worker", envvar="QUIRE_WORKER", metavar="ADDRESS", help="Address of a worker; may be repeated."),
]


def register(app: typer.Typer) -> None:
    """Adds the command to the application."""
    app.command(help=EXAMPLES)(top)


@options.connects
def top(
    *,
    allocator: options.Allocator = options.ALLOCATOR,
    worker: Workers = None,
    interval: Annotated[
        float, typer.Option(metavar="SECONDS", min=0.1, max=3_600, help="Time between two readings.")
    ] = 2.0,
    timeout: options.Timeout = 5.0,
    as_json: options.Json = False,
    credentials: options.Credentials,
) -> None:
    """Reads and shows until Ctrl-C."""
    addresses = list(dict.fromkeys(worker or [options.WORKER]))
    with contextlib.ExitStack() as stack:
        how: Any = {"token": credentials.token, "tls": credentials.tls, "timeout_s": timeout}
        workers = [(address, stack.enter_context(Client(address, **how))) for address in addresses]
        reader = Reader(stack.enter_context(Allocator(allocator, **how)), workers)
        stack.callback(reader.close)
        try:
            if as_json or not sys.stdout.isatty():
                _once(reader, interval, as_json=as_json)
            else:
                _live(reader, interval, f"quire top: {allocator}, every {interval:g} s")
        except KeyboardInterrupt:
            sys.exit(output.INTERRUPTED)


def _once(reader: Reader, interval: float, *, as_json: bool) -> None:
    before = reader.read()
    time.sleep(interval)
    reading = reader.read(before)
    if as_json:
        output.print_json(_as_object(reading))
    else:
        output.console().print(picture(reading, output.WIDTH, None))


def _live(reader: Reader, interval: float, title: str) -> None:
    console = Console(highlight=False)
    reading = reader.read()
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            lines = Text(title, style="dim"), picture(reading, console.width, console.height - 1)
            live.update(output.Printable(Group(*lines)), refresh=True)
            time.sleep(interval)
            reading = reader.read(reading)


def picture(reading: Reading, width: int, height: int | None) -> RenderableType:
    """Returns the tables of a reading. Requests get the terminal lines that the other tables leave free."""
    tenants, requests = reading.tenants(), _ordered(reading.workers)
    parts: list[RenderableType] = [*_workers(reading.workers, width), Text()]
    if reading.allocator_error:
        parts.append(Text(f"allocator: {reading.allocator_error}", style="red"))
    else:
        parts.append(_pools(reading.pools, width))
    room = None if height is None else max(height - len(reading.workers) - len(reading.pools) - 7, 2)
    shown = tenants if room is None else tenants[: max(room // 3, 1)]
    if shown:
        rows = [
            (repr_of(each.namespace), each.running, each.waiting, each.held_block_count, each.cached_block_count)
            for each in shown
        ]
        parts += [Text(), _table(("namespace", "running", "waiting", "held", "cached"), rows, WIDE)]
    left = len(requests) if room is None else max(room - len(shown) - 2, 1)
    if requests:
        parts += [Text(), _requests(requests[:left], width)]
    if len(requests) > left:
        parts.append(Text(f"... {len(requests) - left:,} more requests", style="dim"))
    return Group(*parts)


def _workers(found: Sequence[WorkerReading], width: int) -> Iterator[RenderableType]:
    rows = []
    for each in found:
        if each.status is None:
            continue
        status, rates = each.status, each.rates
        pool = status.pool if status.allocator_connected else _red(f"{status.pool}: no session")
        counts = (status.running_count, status.waiting_count, rates and rates.output, rates and rates.prompt)
        cached = None if rates is None or rates.cached is None else f"{rates.cached:.0%}"
        rows.append((each.address, status.model, pool, *counts, cached, status.preemption_count))
    if rows:
        columns = ("worker", "model", "pool", "running", "waiting", "tokens/s", "prefill/s", "cached", "preempted")
        yield _table(columns, rows, width)
    for each in found:
        if each.error:
            yield _red(f"{each.address}: {each.error}")


def _pools(found: Sequence[PoolReading], width: int) -> Table:
    rows = []
    for usage, evicted in found:
        of = usage.summary
        name = of.pool if of.connected else _red(f"{of.pool}: owner gone")
        saved = max(of.table_entry_count - of.held_block_count, 0)
        counts = (of.spec.block_count, of.held_block_count, of.cached_block_count, of.empty_block_count)
        bar = _bar(of.held_block_count, of.cached_block_count, of.spec.block_count)
        rows.append((name, bar, *counts, of.sequence_count, saved, evicted))
    return _table(("pool", "", "blocks", "held", "cached", "empty", "sequences", "saved", "evicted/s"), rows, width)


def _bar(held: int, cached: int, total: int) -> Text:
    """Returns a bar of a pool's blocks: held ones, then cached ones, then empty ones."""
    first = round(BAR * held / total)
    second = min(round(BAR * cached / total), BAR - first)
    return Text.assemble(("█" * first, "cyan"), ("▒" * second, "blue"), ("·" * (BAR - first - second), "dim"))


def _ordered(workers: Sequence[WorkerReading]) -> list[RequestInfo]:
    """Returns waiting requests, then running ones, each oldest first."""
    found = [request for worker in workers for request in worker.requests]
    return sorted(found, key=lambda each: (each.state is not RequestState.WAITING, -each.age_s))


def _requests(found: Sequence[RequestInfo], width: int) -> Table:
    columns = ("request", "namespace", "state", "seconds", "prompt", "cached", "output", "blocks", "waits for")
    rows = [
        (
            each.request_id, repr_of(each.namespace), state_of(each), each.age_s, each.prompt_token_count,
            each.cached_token_count, each.output_token_count, each.block_count, why(each),
        )
        for each in found
    ]  # fmt: skip
    return _table(columns, rows, width)


def _table(columns: Sequence[str], rows: Iterable[Sequence[object]], width: int) -> Table:
    """Returns a table that fits the width: it truncates names, and omits columns instead of truncating numbers."""
    table = Table(box=None, pad_edge=False)
    kept = [name for name in columns if width >= WIDE or name not in _FOR_WIDE]
    for name in kept:
        text = name in _TEXTS  # Text columns are truncated. Number columns keep their width.
        table.add_column(
            Text(name, no_wrap=True, overflow="ellipsis"), justify="left" if text else "right", no_wrap=not text
        )
    for row in rows:
        table.add_row(*(_cell(value) for name, value in zip(columns, row, strict=True) if name in kept))
    return table


def _cell(value: object) -> Text:
    if isinstance(value, Text):
        return value
    if value is None:
        return Text("")
    said = f"{value:,.1f}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)
    return Text(said, no_wrap=True, overflow="ellipsis")


def _red(text: str) -> Text:
    return Text(text, style="red")


def _as_object(reading: Reading) -> dict[str, Any]:
    """Returns a reading as a JSON object."""
    return {
        "allocator_error": reading.allocator_error or None,
        "workers": [
            {
                "address": each.address,
                "error": each.error or None,
                "rates": each.rates and each.rates._asdict(),
                "running_count": each.status and each.status.running_count,
                "waiting_count": each.status and each.status.waiting_count,
                "model": each.status and each.status.model,
                "pool": each.status and each.status.pool,
                "allocator_connected": each.status and each.status.allocator_connected,
                "requests": [asdict(request) for request in each.requests],
            }
            for each in reading.workers
        ],
        "pools": [
            {
                "pool": each.usage.summary.pool,
                "connected": each.usage.summary.connected,
                "block_count": each.usage.summary.spec.block_count,
                "held_block_count": each.usage.summary.held_block_count,
                "cached_block_count": each.usage.summary.cached_block_count,
                "empty_block_count": each.usage.summary.empty_block_count,
                "sequence_count": each.usage.summary.sequence_count,
                "table_entry_count": each.usage.summary.table_entry_count,
                "evicted_per_s": each.evicted,
            }
            for each in reading.pools
        ],
        "namespaces": [each._asdict() for each in reading.tenants()],
    }
