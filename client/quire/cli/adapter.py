"""`quire adapter`: LoRA adapters of a worker."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from quire import Client
from quire.cli import options, output
from quire.cli.names import CommandGroup
from quire.errors import QuireError, Reason
from quire.types import AdapterInfo

Name = Annotated[str, typer.Argument(help="Name of the adapter in requests.", show_default=False)]


def register(app: typer.Typer) -> None:
    """Adds the commands to the application."""
    group = typer.Typer(no_args_is_help=True, cls=CommandGroup, help="LoRA adapters of a worker: list, load, unload.")
    group.command("list")(list_all)
    group.command()(load)
    group.command()(unload)
    app.add_typer(group, name="adapter")


@options.connects
def load(
    name: Name,
    folder: Annotated[
        str,
        typer.Argument(help="Folder saved by PEFT, relative to the worker's --adapter-folder.", show_default=False),
    ],
    *,
    worker: options.Worker = options.WORKER,
    timeout: options.Timeout = 120.0,
    as_json: options.Json = False,
    credentials: options.Credentials,
) -> None:
    """Load an adapter while the worker serves. Requests select it with quire generate --adapter NAME."""
    with Client(worker, token=credentials.token, tls=credentials.tls, timeout_s=timeout) as client:
        loaded = client.load_adapter(name, folder)
    if as_json:
        output.print_json(_values(loaded))
    else:
        shown = output.printable(loaded.name)
        print(f"{shown}: rank {loaded.rank}, {loaded.layer_count:,} layers, {loaded.byte_count:,} bytes")


@options.connects
def unload(
    name: Name,
    *,
    dry_run: options.DryRun = False,
    worker: options.Worker = options.WORKER,
    timeout: options.Timeout = 10.0,
    as_json: options.Json = False,
    credentials: options.Credentials,
) -> None:
    """Unload an adapter. The worker refuses while requests use it."""
    with Client(worker, token=credentials.token, tls=credentials.tls, timeout_s=timeout) as client:
        if dry_run:
            found = [each for each in client.list_adapters() if each.name == name]
            if not found:
                raise QuireError.of(
                    Reason.ADAPTER_UNKNOWN,
                    f"no adapter named {name!r:.200} is loaded; `quire adapter list` shows the loaded ones",
                )
            said = f"would unload {name}: {found[0].byte_count:,} bytes; {found[0].request_count:,} requests use it"
        else:
            client.unload_adapter(name)
            said = f"{name} was unloaded"
    if as_json:
        output.print_json({"name": name, "dry_run": dry_run})
    else:
        print(said)


@options.connects
def list_all(
    *,
    worker: options.Worker = options.WORKER,
    timeout: options.Timeout = 10.0,
    as_json: options.Json = False,
    credentials: options.Credentials,
) -> None:
    """List the loaded adapters."""
    with Client(worker, token=credentials.token, tls=credentials.tls, timeout_s=timeout) as client:
        found = client.list_adapters()
    if as_json:
        output.print_json([_values(each) for each in found])
        return
    if not found:
        print(f"no adapter is loaded at {worker}")
        return
    table = Table(box=None, pad_edge=False)
    table.add_column("adapter")
    for name in ("rank", "layers", "bytes", "requests"):
        table.add_column(name, justify="right")
    for each in found:
        counts = each.rank, each.layer_count, each.byte_count, each.request_count
        table.add_row(Text(each.name, style="bold"), *(f"{count:,}" for count in counts))
    output.console().print(table)


def _values(found: AdapterInfo) -> dict[str, Any]:
    return {**asdict(found), "digest": found.digest.hex()}
