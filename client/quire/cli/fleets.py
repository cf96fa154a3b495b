"""`quire fleet`: lists an allocator and its workers, with version, state and load of each."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import typer
from rich.table import Table
from rich.text import Text

from quire import Allocator, Client
from quire.cli import options, output
from quire.cli.names import CommandGroup
from quire.cli.top import Workers
from quire.errors import QuireError

EXAMPLES = """List an allocator and workers: version, state, load, and the share of prompts that was cached.

A server that does not answer is listed with the error.

Examples:

    quire fleet list --allocator 10.0.0.4:7070 --worker 10.0.0.5:7071 --worker 10.0.0.6:7071
    quire fleet list --json
"""


def register(app: typer.Typer) -> None:
    """Adds the group of commands to the application."""
    group = typer.Typer(no_args_is_help=True, cls=CommandGroup, help="Allocator and workers of a deployment: list.")
    group.command("list", help=EXAMPLES)(list_all)
    app.add_typer(group, name="fleet")


@options.connects
def list_all(
    *,
    allocator: options.Allocator = options.ALLOCATOR,
    worker: Workers = None,
    timeout: options.Timeout = 5.0,
    as_json: options.Json = False,
    credentials: options.Credentials,
) -> None:
    """Asks all servers in parallel."""
    addresses = list(dict.fromkeys(worker or [options.WORKER]))
    with contextlib.ExitStack() as stack:
        how: Any = {"token": credentials.token, "tls": credentials.tls, "timeout_s": timeout}
        of_pools = stack.enter_context(Allocator(allocator, **how))
        clients = [stack.enter_context(Client(address, **how)) for address in addresses]
        threads = stack.enter_context(ThreadPoolExecutor(len(clients) + 1, thread_name_prefix="quire-fleet"))
        asked = [threads.submit(_answered, "allocator", allocator, functools.partial(_allocator, of_pools))]
        for address, client in zip(addresses, clients, strict=True):
            asked.append(threads.submit(_answered, "worker", address, functools.partial(_worker, client)))
        found = [each.result() for each in asked]
    if as_json:
        output.print_json(found)
    else:
        output.console().print(_table(found))


def _answered(server: str, address: str, ask: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Returns a server's answer, or the reason why there is none."""
    try:
        return {"server": server, "address": address, "error": None, **ask()}
    except QuireError as error:
        return {"server": server, "address": address, "error": str(error)}


def _allocator(client: Allocator) -> dict[str, Any]:
    return {"version": client.server_info().version, "pools": [pool.pool for pool in client.list_pools()]}


def _worker(client: Client) -> dict[str, Any]:
    status = client.status()
    names = (
        "version", "model", "pool", "allocator_connected", "running_count", "waiting_count", "prompt_token_count",
        "cached_token_count",
    )  # fmt: skip
    return {name: getattr(status, name) for name in names}


def _table(found: list[dict[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("server", "address", "version", "state", "model", "pool"):
        table.add_column(name)
    for name in ("running", "waiting", "cached"):
        table.add_column(name, justify="right")
    for each in found:
        head = (Text(each["server"], style="bold"), Text(each["address"]))
        if each["error"]:
            table.add_row(*head, "", Text(each["error"], style="red"))
        elif each["server"] == "allocator":
            table.add_row(*head, Text(each["version"]), "ready", "", Text(f"{len(each['pools']):,} pools"))
        else:
            state = "ready" if each["allocator_connected"] else Text("no session", style="red")
            prompts = each["prompt_token_count"]
            table.add_row(
                *head, Text(each["version"]), state, Text(each["model"]), Text(each["pool"]),
                f"{each['running_count']:,}", f"{each['waiting_count']:,}",
                f"{each['cached_token_count'] / prompts:.0%}" if prompts else "",
            )  # fmt: skip
    return table
