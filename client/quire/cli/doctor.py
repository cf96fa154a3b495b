"""`quire doctor`: finds problems of this machine and its servers, and proposes a remedy for each."""

from __future__ import annotations

import sys
from typing import Annotated, TypeAlias

import typer
from rich.table import Table
from rich.text import Text

from quire.cli import checkup, options, output, scrapes

EXAMPLES = """Check this machine and its servers: packages, compiler, GPU, cache, clock, ports, certificates, scrapes.

The exit code is 0 if no check fails. A warning means: works, but slower or not for long.

Examples:

    quire doctor
    quire doctor --json
    quire doctor --worker 10.0.0.5:7071 --allocator 10.0.0.5:7070
    quire doctor --prometheus http://127.0.0.1:9090
"""
Prometheus: TypeAlias = Annotated[
    str | None,
    typer.Option(
        envvar="QUIRE_PROMETHEUS", metavar="URL", help="A Prometheus to ask which scrapes of Quire's servers fail."
    ),
]
STYLES = {checkup.OK: "green", checkup.WARNING: "yellow", checkup.FAILURE: "red"}


def register(app: typer.Typer) -> None:
    """Adds the command to the application."""
    app.command(help=EXAMPLES)(doctor)


@options.connects
def doctor(
    *,
    allocator: options.Allocator = options.ALLOCATOR,
    worker: options.Worker = options.WORKER,
    prometheus: Prometheus = None,
    timeout: options.Timeout = 5.0,
    as_json: options.Json = False,
    credentials: options.Credentials,
) -> None:
    """Prints the findings, and a remedy for each."""
    caller = scrapes.Caller(credentials.token, credentials.tls, timeout)
    findings = [
        *checkup.of_machine(),
        *scrapes.of_ports(caller),
        *checkup.of_files(),
        *checkup.of_servers(allocator, worker, credentials.token, credentials.tls, timeout),
        *(scrapes.of_prometheus(prometheus, caller) if prometheus else ()),
    ]
    if as_json:
        output.print_json([each._asdict() for each in findings])
    else:
        table = Table(box=None, show_header=False, pad_edge=False)
        for each in findings:
            advice = f"; {each.advice}" if each.advice else ""
            table.add_row(Text(each.state, style=STYLES[each.state]), each.check, Text(f"{each.found}{advice}"))
        output.console().print(table)
    if any(each.state == checkup.FAILURE for each in findings):
        sys.exit(output.FAILED)
