"""Assembles all commands, and reports their errors."""

from __future__ import annotations

import sys
import warnings
from typing import Annotated

import typer

from quire import __version__
from quire.cli import (
    about,
    adapter,
    bench,
    branch,
    cache,
    certs,
    chat,
    doctor,
    fleets,
    generate,
    output,
    plan,
    pool,
    requests,
    score,
    servers,
    status,
    top,
    up,
)
from quire.cli.names import CommandGroup
from quire.errors import QuireError

app = typer.Typer(
    name="quire",
    cls=CommandGroup,
    help="Paged KV cache as a service: run it, use it, look into it.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"quire {__version__}, core {about.core() or 'not installed'}")
        raise typer.Exit


@app.callback()
def quire(
    _version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and how the core runs."
        ),
    ] = False,
) -> None:
    """Paged KV cache as a service: run it, use it, look into it."""


up.register(app)
servers.register(app)
generate.register(app)
chat.register(app)
score.register(app)
bench.register(app)
pool.register(app)
cache.register(app)
status.register(app)
top.register(app)
fleets.register(app)
adapter.register(app)
requests.register(app)
branch.register(app)
plan.register(app)
certs.register(app)
doctor.register(app)
about.register(app)


def _show_warning(message: Warning | str, *_: object, **__: object) -> None:
    print(f"quire: {message}", file=sys.stderr)


def run() -> None:
    """Runs the command line. A QuireError prints one line, and its kind determines the exit code."""
    warnings.showwarning = _show_warning
    try:
        try:  # Typer's standalone mode prints usage errors in a box, so it is off with JSON.
            code = app(prog_name="quire", standalone_mode=not output.is_json_asked_for())
        except SystemExit as done:
            code = done.code
        sys.stdout.flush()
        sys.exit(code)
    except (QuireError, typer.TyperException) as error:
        output.end_with(error)
    except OSError as error:  # for example, the disk is full, or there is no folder for temporary files
        output.end_with(error)
