"""Options that several commands have.

Options for the server to call, the credentials and the timeout have an environment variable: $QUIRE_ and the option's
name. An option overrides its variable, and the variable overrides the default.
"""

from __future__ import annotations

import functools
import inspect
import math
import re
from collections.abc import Callable
from typing import Annotated, Any, Final, NamedTuple, TypeAlias

import typer

from quire._secret_files import read_token
from quire._transport.channel import DEFAULT_ALLOCATOR, DEFAULT_WORKER
from quire._transport.timeouts import TIMEOUT_S_MAX
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


def is_number(value: float) -> float:
    """Returns a number from the command line.

    Raises:
        BadParameter: the number is NaN. An option's range does not refuse it, because comparisons with NaN are false.
    """
    if math.isnan(value):
        raise typer.BadParameter("nan is not a number")
    return value


Json: TypeAlias = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
Timeout: TypeAlias = Annotated[
    float,
    typer.Option(
        "--timeout",
        envvar="QUIRE_TIMEOUT",
        metavar="SECONDS",
        min=0.001,
        max=TIMEOUT_S_MAX,
        callback=is_number,
        help="How long a call may take.",
    ),
]
_DURATION: Final = re.compile(r"([0-9]{1,9})(ms|s|m|h)")
_UNIT_S: Final = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3_600.0}


def duration_s(text: str) -> float:
    """Returns the seconds of a duration from the command line.

    Raises:
        BadParameter: the text is not a number with a unit.
    """
    found = _DURATION.fullmatch(text)
    if found is None:
        raise typer.BadParameter(f'{text!r:.80} is no duration: give a number and ms, s, m or h, such as "30m"')
    return int(found[1]) * _UNIT_S[found[2]]


DryRun: TypeAlias = Annotated[bool, typer.Option("--dry-run", help="Only print what would be removed.")]

ALLOCATOR = DEFAULT_ALLOCATOR
WORKER = DEFAULT_WORKER

_FILES: Final = {
    "token_file": TokenFile,
    "tls_ca": _file("QUIRE_TLS_CA", "Certificate authorities of the servers to trust; turns TLS on."),
    "tls_cert": _file("QUIRE_TLS_CERT", "Certificate of this client, for servers that require one."),
    "tls_key": _file("QUIRE_TLS_KEY", "Private key of --tls-cert."),
}


class Credentials(NamedTuple):
    """The token and TLS settings of a connection."""

    token: str | None
    tls: Tls | None


def connects(command: Callable[..., None]) -> Callable[..., None]:
    """Adds the options of a connection to a command. The command gets their values as `credentials`.

    Raises:
        UsageError: raised by the command: a file is unusable, or an option needs another option.
    """

    def made(values: dict[str, Any]) -> Credentials:
        token_file, ca, cert, key = values.values()
        return Credentials(read_token(token_file), tls_of(ca, cert, key, "--tls-ca (QUIRE_TLS_CA)"))

    return replaced(command, "credentials", {name: (kind, None) for name, kind in _FILES.items()}, made)


def replaced(
    command: Callable[..., None],
    name: str,
    options: dict[str, tuple[Any, Any]],
    made: Callable[[dict[str, Any]], object],
) -> Callable[..., None]:
    """Returns a command with several options instead of one parameter.

    Args:
        command: a typer command.
        name: the parameter's name. The parameter is passed by keyword.
        options: annotation and default of each option, by name.
        made: returns the parameter's value from a dictionary of the options' values, in the order of `options`.
    """
    signature = inspect.signature(command, eval_str=True)
    own = [parameter for parameter in signature.parameters.values() if parameter.name != name]
    keyword = inspect.Parameter.KEYWORD_ONLY
    new = [
        inspect.Parameter(each, keyword, default=default, annotation=kind) for each, (kind, default) in options.items()
    ]

    @functools.wraps(command)
    def call(*arguments: Any, **values: Any) -> None:
        given = {each: values.pop(each) for each in options}
        command(*arguments, **{name: made(given)}, **values)

    call.__signature__ = signature.replace(parameters=[*own, *new])  # type: ignore[attr-defined]
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in (*own, *new)}
    del call.__wrapped__  # With this attribute, typer would read the wrapped function's signature.
    return call
