"""`quire up`: runs an allocator, a worker and a gateway on this machine."""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import typer
from rich.console import Console

from quire._descriptors import require_open_files
from quire._distribution import how_to_install
from quire._extras import PACKAGES, require_extra
from quire._never_blocking import standard_error_taken
from quire._secret_files import read_token
from quire._transport.address import require_free
from quire._transport.channel import DEFAULT_ALLOCATOR, DEFAULT_WORKER
from quire.cli import options, output
from quire.cli.names import Up
from quire.cli.servers import check_worker, completions, imported
from quire.errors import UsageError
from quire.local import DRAIN_S, LocalStack

EXAMPLES = """Run an allocator, a worker and a gateway on this machine until Ctrl-C.

Arguments after -- go to the worker (see quire worker --help). Arguments after a second -- go to the gateway (see quire
gateway --help).

Examples:

    quire up
    quire up --model ~/models/Qwen3-0.6B -- --kv-memory 2GiB
    quire up --model ~/models/Qwen3-8B --tensor-parallel 2
    quire up --model ~/models/Qwen3-8B -- -- --tool-call-format hermes
    quire up --listen-allocator 127.0.0.1:0 --listen-worker 127.0.0.1:0 --listen-gateway none
"""
NO_GATEWAY: Final = "none"


def register(app: typer.Typer) -> None:
    """Adds the command to the application."""
    app.command(cls=Up, help=EXAMPLES)(up)


def _complete(ctx: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    """Returns completions: the worker's options after the first --, the gateway's after the second."""
    given = ctx.params.get("server_arguments") or []
    return completions("gateway" if "--" in given else "worker", given, incomplete)


def _metrics(server: str) -> Any:
    return typer.Option(metavar="ADDRESS", help=f"Address of the {server}'s /metrics.")


def _seconds(least: float, text: str) -> Any:
    return typer.Option(metavar="SECONDS", min=least, max=86_400, callback=options.is_number, help=text)


def up(
    context: typer.Context,
    server_arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[-- WORKER OPTIONS... [-- GATEWAY OPTIONS...]]", autocompletion=_complete),
    ] = None,
    *,
    model: Annotated[Path, typer.Option(help="Folder of the model.", metavar="FOLDER")] = Path("models/demo"),
    listen_allocator: Annotated[
        str, typer.Option(metavar="ADDRESS", help="The allocator's address.")
    ] = DEFAULT_ALLOCATOR,
    listen_worker: Annotated[str, typer.Option(metavar="ADDRESS", help="The worker's address.")] = DEFAULT_WORKER,
    listen_gateway: Annotated[
        str,
        typer.Option(metavar="ADDRESS", help=f"Listening address of OpenAI's endpoints; {NO_GATEWAY}: no gateway."),
    ] = "127.0.0.1:8000",
    metrics_allocator: Annotated[str, _metrics("allocator")] = "127.0.0.1:9470",
    metrics_worker: Annotated[str, _metrics("worker")] = "127.0.0.1:9471",
    token_file: options.TokenFile = None,
    log_folder: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Write logs to this folder instead of showing them.")
    ] = None,
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], typer.Option(help="Lowest level that is logged.")
    ] = "warning",
    tensor_parallel: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Processes that compute the model together.")
    ] = None,
    drain_timeout: Annotated[float, _seconds(0, "How long running answers may take after Ctrl-C.")] = DRAIN_S,
    start_timeout: Annotated[float, _seconds(1, "How long the servers may take to start.")] = 300.0,
    as_json: Annotated[
        bool, typer.Option("--json", help="When all servers are ready, print their addresses as one line of JSON.")
    ] = False,
) -> None:
    """Runs a LocalStack in the foreground."""
    worker_arguments, gateway_arguments = _shared_out(server_arguments or [], context)
    common = ["--log-level", log_level, *(["--token-file", token_file] if token_file else [])]
    ranks = [] if tensor_parallel is None else ["--tensor-parallel", str(tensor_parallel)]
    of_worker = [*common, *ranks, *worker_arguments]
    of_gateway = [*common, *gateway_arguments]
    # Errors that can be found early are reported before any server starts.
    require_open_files("quire up")
    require_extra("allocator")
    read_token(token_file)
    check_worker(["--model", str(model), *of_worker], are_ports_ours=False)
    _check_gateway(listen_gateway, gateway_arguments)
    of_allocator = {"--listen-allocator": listen_allocator, "--metrics-allocator": metrics_allocator}
    of_others = {"--listen-worker": listen_worker, "--metrics-worker": metrics_worker}
    _require_free({**of_allocator, **of_others, "--listen-gateway": listen_gateway})
    _make(log_folder)
    console = Console(stderr=True, highlight=False)
    stack = LocalStack(
        model,
        allocator_listen=listen_allocator,
        allocator_metrics=metrics_allocator,
        worker_listen=listen_worker,
        worker_metrics=metrics_worker,
        gateway_listen=listen_gateway if _has_gateway(listen_gateway, console) else None,
        allocator_arguments=common,
        worker_arguments=of_worker,
        gateway_arguments=of_gateway,
        log_folder=log_folder,
        inherit_logs=log_folder is None,
        start_timeout_s=start_timeout,
        drain_timeout_s=drain_timeout,
        on_progress=lambda line: console.print(f"quire: {line}", style="dim", markup=False),
    )
    _run(stack, console, drain_timeout, as_json=as_json)


def _shared_out(arguments: list[str], context: typer.Context) -> tuple[list[str], list[str]]:
    """Splits the arguments at a -- into the worker's options and the gateway's.

    Raises:
        BadParameter: the first argument is not an option.
    """
    if arguments and not arguments[0].startswith("-"):
        meant = f"unexpected argument: give the model as --model {arguments[0]}, and options of the worker after --"
        raise typer.BadParameter(meant, context)
    at = arguments.index("--") if "--" in arguments else len(arguments)
    return arguments[:at], arguments[at + 1 :]


def _check_gateway(address: str, arguments: list[str]) -> None:
    """Checks the gateway's options, if there are any.

    Raises:
        UsageError: no gateway will run, or its packages are missing.
        SystemExit: an option is unknown. The parser has printed the error.
    """
    if not arguments:
        return
    if address == NO_GATEWAY:
        raise UsageError(f"{arguments[0]} is an option of the gateway, but --listen-gateway {NO_GATEWAY} starts none")
    imported("quire_gateway.options").parse_arguments(arguments)


def _require_free(addresses: Mapping[str, str]) -> None:
    """Checks that servers can listen at the addresses in these options.

    Raises:
        UsageError: a server cannot listen at one of the addresses.
    """
    for option, address in addresses.items():
        if address != NO_GATEWAY:
            require_free(option, address)


def _has_gateway(address: str, console: Console) -> bool:
    """Tells whether a gateway will run. Prints a note if only its packages are missing."""
    if address == NO_GATEWAY:
        return False
    is_there = all(importlib.util.find_spec(name) is not None for name in PACKAGES["gateway"])
    if not is_there:
        console.print(f"quire: no gateway, because its packages are missing: {how_to_install('gateway')}", markup=False)
    return is_there


def _make(folder: Path | None) -> None:
    """Creates the folder for logs, if one is given.

    Raises:
        UsageError: the folder cannot be created.
    """
    try:
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--log-folder {folder}: {error.strerror}") from None


@standard_error_taken()
def _run(stack: LocalStack, console: Console, drain_timeout: float, *, as_json: bool) -> None:
    """Serves until Ctrl-C or SIGTERM. Both signals raise an exception, so that `stop` runs."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    stopping = f"quire: stopping; running answers may take {drain_timeout:g} s more, and Ctrl-C again ends them now"
    try:
        with stack:
            if as_json:
                output.print_json(_addresses(stack))
                sys.stdout.flush()
            console.print(_usage(stack), markup=False)
            try:
                stack.wait()
            except KeyboardInterrupt:
                console.print(stopping, style="dim")
                raise
    except KeyboardInterrupt:
        console.print("quire: stopped", style="dim")


def _addresses(stack: LocalStack) -> dict[str, str | None]:
    return {
        "allocator": stack.allocator_address,
        "worker": stack.worker_address,
        "gateway": None if stack.gateway is None else f"http://{stack.gateway_address}",
    }


def _usage(stack: LocalStack) -> str:
    allocator, worker = stack.allocator_address, stack.worker_address
    # Without an option, commands call the addresses in the environment. If those variables differ from these servers'
    # addresses, the printed examples need the option.
    to_worker = "" if worker == os.environ.get("QUIRE_WORKER", DEFAULT_WORKER) else f" --worker {worker}"
    to_allocator = (
        "" if allocator == os.environ.get("QUIRE_ALLOCATOR", DEFAULT_ALLOCATOR) else f" --allocator {allocator}"
    )
    to_gateway = "" if stack.gateway is None else f"\n  curl http://{stack.gateway_address}/v1/models"
    return f"""
Serving. In another terminal:
  quire generate "The for statement"{to_worker}
  quire pool list{to_allocator}
  quire pool show default{to_allocator}{to_gateway}
Ctrl-C stops all.
"""
