"""`quire up`, `quire allocator`, `quire worker`, `quire gateway`: servers on this machine."""

from __future__ import annotations

import importlib
import importlib.util
import os
import signal
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.console import Console

from quire._secret_files import read_token
from quire.cli import options
from quire.errors import UsageError
from quire.local import LocalStack

PASS_ON: Final = {
    "allow_extra_args": True,
    "ignore_unknown_options": True,
    "allow_interspersed_args": False,
    "help_option_names": [],
}

UP_EXAMPLES = """Run an allocator, a worker and a gateway on this machine until Ctrl-C.

Arguments after -- go to the worker (see quire worker --help).

Examples:

    quire up
    quire up --model ~/models/Qwen3-0.6B -- --kv-memory 2GiB
    quire up --model ~/models/Qwen3-8B --tensor-parallel 2
    quire up --allocator 127.0.0.1:0 --worker 127.0.0.1:0 --gateway none     (any free ports, no HTTP)
"""
NO_GATEWAY: Final = "none"


def register(app: typer.Typer) -> None:
    """Adds the commands to the application."""
    app.command(help=UP_EXAMPLES)(up)
    app.command(
        context_settings=PASS_ON,
        add_help_option=False,
        help="Run an allocator alone; takes the options of quire-allocator (quire allocator --help).",
    )(allocator)
    app.command(
        context_settings=PASS_ON,
        add_help_option=False,
        help="Run a worker alone; takes the options of quire-worker (quire worker --help).",
    )(worker)
    app.command(
        context_settings=PASS_ON,
        add_help_option=False,
        help="Serve OpenAI's endpoints from workers; takes the options of quire-gateway (quire gateway --help).",
    )(gateway)


def up(
    worker_arguments: Annotated[list[str] | None, typer.Argument(metavar="[-- WORKER OPTIONS...]")] = None,
    *,
    model: Annotated[Path, typer.Option(help="Folder of the model.", metavar="FOLDER")] = Path("models/demo"),
    allocator: options.Allocator = options.ALLOCATOR,
    worker: options.Worker = options.WORKER,
    gateway: Annotated[
        str, typer.Option(metavar="ADDRESS", help=f"Address of OpenAI's endpoints; {NO_GATEWAY}: without them.")
    ] = "127.0.0.1:8000",
    allocator_metrics: Annotated[str, typer.Option(metavar="ADDRESS", help="Its /metrics.")] = "127.0.0.1:9470",
    worker_metrics: Annotated[str, typer.Option(metavar="ADDRESS", help="Its /metrics.")] = "127.0.0.1:9471",
    token_file: options.TokenFile = None,
    log_folder: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Keep the logs there instead of showing them.")
    ] = None,
    log_level: Annotated[str, typer.Option(metavar="LEVEL", help="debug, info, warning or error.")] = "warning",
    tensor_parallel: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Processes that compute the model together.")
    ] = None,
    start_timeout: Annotated[
        float, typer.Option(metavar="SECONDS", min=1, help="How long both may take to serve.")
    ] = 300.0,
) -> None:
    """Runs a LocalStack in the foreground."""
    if not model.is_dir():
        raise UsageError(f"no model in {model}; give a folder with --model")
    read_token(token_file)  # a file that neither could use is better said once and at once
    if log_folder is not None:
        log_folder.mkdir(parents=True, exist_ok=True)
    common = ["--log-level", log_level, *(["--token-file", token_file] if token_file else [])]
    ranks = [] if tensor_parallel is None else ["--tensor-parallel", str(tensor_parallel)]
    console = Console(stderr=True, highlight=False)
    if gateway != NO_GATEWAY and importlib.util.find_spec("fastapi") is None:
        console.print("quire: no gateway, because its packages are missing: pip install 'quire-kv[gateway]'")
        gateway = NO_GATEWAY
    stack = LocalStack(
        model,
        allocator_listen=allocator,
        allocator_metrics=allocator_metrics,
        worker_listen=worker,
        worker_metrics=worker_metrics,
        gateway_listen=None if gateway == NO_GATEWAY else gateway,
        allocator_arguments=common,
        worker_arguments=[*common, *ranks, *(worker_arguments or [])],
        gateway_arguments=common,
        log_folder=log_folder,
        inherit_logs=log_folder is None,
        start_timeout_s=start_timeout,
        on_progress=lambda line: console.print(f"quire: {line}", style="dim", markup=False),
    )
    # SIGTERM ends the command as Ctrl-C does: by an exception that passes through `stop`.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with stack:
            console.print(_usage(stack), markup=False)
            stack.wait()
    except KeyboardInterrupt:
        console.print("quire: stopped", style="dim")


def allocator(context: typer.Context) -> None:
    """Hands over to `quire_allocator.server.main`."""
    _hand_over("quire_allocator", context.args)


def worker(context: typer.Context) -> None:
    """Hands over to `quire_worker.server.main`."""
    # Before torch is loaded: its threads sleep between two forward passes instead of spinning on the server's cores.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # Help and wrong options are answered before torch is loaded, which takes seconds.
    _imported("quire_worker", "options").parse_arguments(context.args)
    _hand_over("quire_worker", context.args)


def gateway(context: typer.Context) -> None:
    """Hands over to `quire_gateway.server.main`."""
    _hand_over("quire_gateway", context.args)


def _hand_over(package: str, arguments: list[str]) -> None:
    _imported(package, "server").main(arguments)


def _imported(package: str, name: str) -> Any:
    """Imports a module of a server.

    Raises:
        UsageError: a package that it needs is not installed.
    """
    try:
        return importlib.import_module(f"{package}.{name}")
    except ModuleNotFoundError as error:
        extra = package.removeprefix("quire_")
        raise UsageError(f"the package {error.name!r} is missing: pip install 'quire-kv[{extra}]'") from None


def _usage(stack: LocalStack) -> str:
    allocator, worker = stack.allocator_address, stack.worker_address
    to_worker = "" if worker == options.WORKER else f" --worker {worker}"
    to_allocator = "" if allocator == options.ALLOCATOR else f" --allocator {allocator}"
    to_gateway = "" if stack.gateway is None else f"\n  curl http://{stack.gateway_address}/v1/models"
    return f"""
Serving. In another terminal:
  quire generate "The for statement"{to_worker}
  quire pools{to_allocator}
  quire blocks default{to_allocator}{to_gateway}
Ctrl-C stops all.
"""
