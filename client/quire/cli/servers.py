"""`quire allocator`, `quire worker` and `quire gateway`: each runs a server, and passes it the options."""

from __future__ import annotations

import argparse
import importlib
import os
from typing import Any, Final

import typer
from typer.core import CompletionItem, TyperCommand

from quire._descriptors import SERVER_THREADS_MIN, require_open_files, require_threads
from quire._extras import require_extra
from quire.errors import UsageError

PASS_ON: Final = {
    "allow_extra_args": True,
    "ignore_unknown_options": True,
    "allow_interspersed_args": False,
    "help_option_names": [],
}
PARSERS: Final = {  # modules with a `make_parser` function
    "allocator": "quire_allocator.server",
    "worker": "quire_worker.process.options",
    "gateway": "quire_gateway.options",
}


class PassedOn(TyperCommand):
    """A command that passes its options to a server. Shells can still complete these options."""

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        """Returns the completions of `incomplete`."""
        return [CompletionItem(value, help=text) for value, text in completions(str(self.name), ctx.args, incomplete)]


def register(app: typer.Typer) -> None:
    """Adds the commands to the application."""
    for command, text in (
        (allocator, "Run an allocator alone"),
        (worker, "Run a worker alone"),
        (gateway, "Serve OpenAI's endpoints from workers"),
    ):
        name = command.__name__
        app.command(
            cls=PassedOn,
            context_settings=PASS_ON,
            add_help_option=False,
            help=f"{text}; takes the options of quire-{name} (quire {name} --help).",
        )(command)


def allocator(context: typer.Context) -> None:
    """Hands over to `quire_allocator.server.main`."""
    require_open_files("quire allocator")
    require_threads("quire allocator", SERVER_THREADS_MIN)
    _hand_over("quire_allocator.server", context.args)


def worker(context: typer.Context) -> None:
    """Hands over to `quire_worker.process.server.main`."""
    require_open_files("quire worker")
    require_threads("quire worker", SERVER_THREADS_MIN)
    # Must be set before torch is loaded. The server's threads then sleep between two forward passes instead of spinning
    # on its cores.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # Loading torch takes seconds. So help, wrong options, missing files and taken ports are handled first.
    check_worker(context.args)
    _hand_over("quire_worker.process.server", context.args)


def gateway(context: typer.Context) -> None:
    """Hands over to `quire_gateway.server.main`."""
    require_open_files("quire gateway")
    require_threads("quire gateway", SERVER_THREADS_MIN)
    _hand_over("quire_gateway.server", context.args)


def check_worker(arguments: list[str], *, are_ports_ours: bool = True) -> None:
    """Checks a worker's command line, as far as that is quick.

    Args:
        arguments: the worker's command line.
        are_ports_ours: whether to check its ports, too.

    Raises:
        UsageError: a file is missing, a port is in use, or the pool is too large.
        SystemExit: an option is unknown. The parser has printed the error.
    """
    options = imported("quire_worker.process.options").parse_arguments(arguments)
    preflight = imported("quire_worker.process.preflight")
    try:
        preflight.check(options) if are_ports_ours else preflight.check_files(options)
    except preflight.ModelError as error:
        raise UsageError(str(error)) from None


def completions(server: str, arguments: list[str], incomplete: str) -> list[tuple[str, str]]:
    """Returns the options of a server, or the choices of the preceding option, each with its help."""
    try:
        parser: argparse.ArgumentParser = imported(PARSERS[server]).make_parser()
    except UsageError:  # The server is not installed.
        return []
    choices = {
        name: list(map(str, action.choices))
        for action in parser._actions
        for name in action.option_strings
        if action.choices
    }
    if arguments and arguments[-1] in choices:
        return [(choice, "") for choice in choices[arguments[-1]] if choice.startswith(incomplete)]
    if not incomplete.startswith("-"):
        return []
    return [
        (name, " ".join((action.help or "").replace("%%", "%").split()))
        for action in parser._actions
        for name in action.option_strings
        if name.startswith(incomplete) and name.startswith("--") and action.help != argparse.SUPPRESS
    ]


def imported(name: str) -> Any:
    """Imports a module of a server.

    Raises:
        UsageError: the module's packages are not installed.
    """
    require_extra(name.partition(".")[0].removeprefix("quire_"))
    return importlib.import_module(name)


def _hand_over(server: str, arguments: list[str]) -> None:
    imported(server).main(arguments)
