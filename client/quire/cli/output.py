"""What commands write: tables that cut nothing, JSON that says names, errors in either form, and exit codes."""

from __future__ import annotations

import enum
import json
import sys
from typing import Any, Final

import grpc
from rich.console import Console

from quire.errors import QuireError, UsageError
from quire.local import ServerFailedError

WIDTH: Final = 1_000  # a table is as wide as what is in it; a terminal that is narrower wraps it
USAGE: Final = 2
INTERRUPTED: Final = 130
# By the canonical code of a call that failed; docs/operating.md has the table.
EXIT_CODES: Final = {
    grpc.StatusCode.UNAVAILABLE: 3,
    grpc.StatusCode.DEADLINE_EXCEEDED: 4,
    grpc.StatusCode.UNAUTHENTICATED: 5,
    grpc.StatusCode.PERMISSION_DENIED: 5,
    grpc.StatusCode.NOT_FOUND: 6,
    grpc.StatusCode.RESOURCE_EXHAUSTED: 7,
    grpc.StatusCode.INVALID_ARGUMENT: 8,
    grpc.StatusCode.UNIMPLEMENTED: 9,
}
FAILED: Final = 1


def console() -> Console:
    """Returns what tables are printed on: neither numbers nor names are ever cut."""
    return Console(highlight=False, width=WIDTH)


def print_json(value: Any) -> None:
    """Prints a value as JSON, its enumerations by name."""
    print(json.dumps(_named(value)))


def _named(value: Any) -> Any:
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, dict):
        return {key: _named(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_named(each) for each in value]
    return value


def end_with(error: QuireError | ServerFailedError | UsageError) -> None:
    """Says what went wrong on standard error, as JSON where the command line asks for JSON, and exits."""
    if "--json" in sys.argv[1:]:
        print(json.dumps({"error": _fields(error)}), file=sys.stderr)
    else:
        print(f"quire: {error}", file=sys.stderr)
    if isinstance(error, UsageError):
        sys.exit(USAGE)
    sys.exit(EXIT_CODES.get(error.code, FAILED) if isinstance(error, QuireError) else FAILED)


def _fields(error: Exception) -> dict[str, Any]:
    if not isinstance(error, QuireError):
        return {"code": "USAGE" if isinstance(error, UsageError) else "SERVER_FAILED", "message": str(error)}
    return {
        "code": error.code.name,
        "reason": error.reason,
        "message": error.message,
        "request_id": error.request_id,
        "retry_after_s": error.retry_after_s,
    }
