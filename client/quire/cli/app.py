"""All commands together, and what their errors look like."""

from __future__ import annotations

from typing import Annotated

import typer

from quire import __version__
from quire.cli import adapters, certs, generate, output, plan, pools, servers, status, watch
from quire.errors import QuireError, UsageError
from quire.local import ServerFailedError

app = typer.Typer(
    name="quire",
    help="Paged KV cache as a service: run it, use it, look into it.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"quire {__version__}")
        raise typer.Exit


@app.callback()
def quire(
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Paged KV cache as a service: run it, use it, look into it."""


servers.register(app)
generate.register(app)
pools.register(app)
watch.register(app)
status.register(app)
adapters.register(app)
plan.register(app)
certs.register(app)


def run() -> None:
    """Runs the command line; an error of Quire ends it with one line, and an exit code that says of what kind."""
    try:
        app(prog_name="quire")
    except (QuireError, ServerFailedError, UsageError) as error:
        output.end_with(error)
