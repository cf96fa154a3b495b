"""Prints the commands' output: tables without truncation, JSON with names, errors in both forms, and exit codes."""

from __future__ import annotations

import contextlib
import enum
import json
import os
import sys
from collections.abc import Iterator
from typing import Any, Final

import grpc
import typer
from rich.console import Console, ConsoleOptions, ConsoleRenderable, RenderHook
from rich.segment import Segment

from quire.errors import QuireError, UsageError
from quire.local import ServerFailedError

WIDTH: Final = 1_000  # A table is as wide as its content. A narrower terminal wraps the table's lines.
USAGE: Final = 2
INTERRUPTED: Final = 130
# Exit code by the failed call's gRPC status. docs/operating.md has the table.
EXIT_CODES: Final = {
    grpc.StatusCode.UNAVAILABLE: 3,
    grpc.StatusCode.DEADLINE_EXCEEDED: 4,
    grpc.StatusCode.UNAUTHENTICATED: 5,
    grpc.StatusCode.PERMISSION_DENIED: 5,
    grpc.StatusCode.NOT_FOUND: 6,
    grpc.StatusCode.RESOURCE_EXHAUSTED: 7,
    grpc.StatusCode.INVALID_ARGUMENT: 8,
    grpc.StatusCode.UNIMPLEMENTED: 9,
    grpc.StatusCode.ALREADY_EXISTS: 10,
    grpc.StatusCode.FAILED_PRECONDITION: 10,
    grpc.StatusCode.ABORTED: 10,
}
FAILED: Final = 1


def console() -> Console:
    """Returns the console for tables. The console truncates no number or name, and escapes control characters."""
    made = Console(highlight=False, width=WIDTH)
    made.push_render_hook(_Printing())
    return made


def printable(text: str) -> str:
    """Escapes control characters, so that text from a model or a server cannot control a terminal."""
    return "".join(char if char.isprintable() or char in "\n\t" else "\N{REPLACEMENT CHARACTER}" for char in text)


def complain(text: object) -> None:
    """Prints a text on standard error."""
    print(f"quire: {printable(str(text))}", file=sys.stderr)


class _Printing(RenderHook):
    """Escapes control characters in all text of a console."""

    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        """Wraps each object to print in `Printable`."""
        return [Printable(each) for each in renderables]


class Printable:
    """A renderable with escaped control characters, so that its text cannot control a terminal."""

    def __init__(self, inner: ConsoleRenderable) -> None:
        self._inner = inner

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        for text, style, control in console.render(self._inner, options):
            yield Segment(printable(text), style, control)


def print_json(value: Any) -> None:
    """Prints a value as JSON, with enumerations by name."""
    print(json.dumps(_named(value)))


def _named(value: Any) -> Any:
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, dict):
        return {key: _named(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_named(each) for each in value]
    return value


def is_json_asked_for() -> bool:
    """Tells whether the command line asks for JSON, even if it has errors."""
    own = sys.argv[1:]
    return "--json" in own[: own.index("--")] if "--" in own else "--json" in own


def end_with(error: QuireError | typer.TyperException | OSError) -> None:
    """Prints an error on standard error, as JSON if the command line asks for JSON, and exits."""
    if isinstance(error, OSError) and not isinstance(error, QuireError):
        _drop_output()
    if isinstance(error, BrokenPipeError):  # The reader, such as `head`, has stopped reading.
        sys.exit(FAILED)
    if is_json_asked_for():
        print(json.dumps({"error": _fields(error)}), file=sys.stderr)
    else:
        complain(error)
    if isinstance(error, UsageError | typer.TyperException):
        sys.exit(USAGE)
    if isinstance(error, QuireError) and not isinstance(error, ServerFailedError):
        sys.exit(EXIT_CODES.get(error.code, FAILED))
    sys.exit(FAILED)


def _drop_output() -> None:
    """Drops unwritten output. Otherwise Python tries to write it again at exit, and prints an error."""
    with contextlib.suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _fields(error: Exception) -> dict[str, Any]:
    """Returns the same six fields for every error. Fields that the error lacks are null."""
    if isinstance(error, QuireError) and not isinstance(error, ServerFailedError | UsageError):
        return {
            "code": error.code.name,
            "reason": error.reason,
            "field": error.field,
            "message": error.message,
            "request_id": error.request_id,
            "retry_after_s": error.retry_after_s,
        }
    code = "USAGE"
    if isinstance(error, ServerFailedError | OSError):
        code = "SERVER_FAILED" if isinstance(error, ServerFailedError) else "SYSTEM"
    said = error.format_message() if isinstance(error, typer.TyperException) else str(error)
    return {"code": code, "reason": None, "field": None, "message": said, "request_id": None, "retry_after_s": None}
