"""Options that several commands have."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Annotated, Any, Final, NamedTuple, TypeAlias

import typer

from quire._secret_files import read_token
from quire._transport.channel import DEFAULT_ALLOCATOR, DEFAULT_WORKER
from quire.tls import Tls, tls_of

Allocator: TypeAlias = Annotated[
    str, typer.Option(envvar="QUIRE_ALLOCATOR", metavar="ADDRESS", help="Address of the allocator.")
]
Worker: TypeAlias = Annotated[
    str, typer.Option(envvar="QUIRE_WORKER", metavar="ADDRESS", help="Address of the worker.")
]


def _file(variable: str, text: str) -> Any:
    return Annotated[str | None, typer.Option(envvar=variable, metavar="FILE", help=text)]


TokenFile: TypeAlias = Annotated[
    str | None, typer.Option(envvar="QUIRE_TOKEN_FILE", metavar="PATH", help="File with the bearer token.")
]
Json: TypeAlias = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
Timeout: TypeAlias = Annotated[
    float, typer.Option("--timeout", metavar="SECONDS", min=0.001, help="How long a call may take.")
]

ALLOCATOR = DEFAULT_ALLOCATOR
WORKER = DEFAULT_WORKER

_FILES: Final = {
    "token_file": TokenFile,
    "tls_ca": _file("QUIRE_TLS_CA", "Authorities of the servers to trust; encrypts the connection."),
    "tls_cert": _file("QUIRE_TLS_CERT", "The certificate to show, for servers that ask for one."),
    "tls_key": _file("QUIRE_TLS_KEY", "Its private key."),
}


class Credentials(NamedTuple):
    """What a connection is opened with."""

    token: str | None
    tls: Tls | None


def connects(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command the options of a connection; what they say comes to it as `credentials`.

    Raises:
        UsageError: from the command: a file is unusable, or one comes without another that it needs.
    """
    signature = inspect.signature(command, eval_str=True)
    own = [parameter for parameter in signature.parameters.values() if parameter.name != "credentials"]
    keyword = inspect.Parameter.KEYWORD_ONLY
    files = [inspect.Parameter(name, keyword, default=None, annotation=kind) for name, kind in _FILES.items()]

    @functools.wraps(command)
    def call(*arguments: Any, **values: Any) -> None:
        token_file, *tls = (values.pop(name) for name in _FILES)
        command(*arguments, credentials=Credentials(read_token(token_file), tls_of(*tls)), **values)

    call.__signature__ = signature.replace(parameters=[*own, *files])  # type: ignore[attr-defined]
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in (*own, *files)}
    del call.__wrapped__  # which typer would look at instead
    return call
