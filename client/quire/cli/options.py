"""Options that several commands have."""

from __future__ import annotations

from typing import Annotated, TypeAlias

import typer

from quire._channel import DEFAULT_ALLOCATOR, DEFAULT_WORKER

Allocator: TypeAlias = Annotated[
    str, typer.Option(envvar="QUIRE_ALLOCATOR", metavar="ADDRESS", help="Address of the allocator.")
]
Worker: TypeAlias = Annotated[
    str, typer.Option(envvar="QUIRE_WORKER", metavar="ADDRESS", help="Address of the worker.")
]
TokenFile: TypeAlias = Annotated[
    str | None, typer.Option(envvar="QUIRE_TOKEN_FILE", metavar="PATH", help="File with the bearer token.")
]
Json: TypeAlias = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
Timeout: TypeAlias = Annotated[
    float, typer.Option("--timeout", metavar="SECONDS", min=0.001, help="How long a call may take.")
]

ALLOCATOR = DEFAULT_ALLOCATOR
WORKER = DEFAULT_WORKER
