"""The `quire` command, with one file for each subcommand."""

from __future__ import annotations

import sys

from quire._descriptors import COMMAND_THREADS_MIN, open_missing, require_threads
from quire._distribution import how_to_install


def main() -> None:
    """Runs `quire`. An error prints one line on standard error and exits with 1; a usage error exits with 2."""
    open_missing()
    for stream in (sys.stdout, sys.stderr):  # A model's text may contain characters that the terminal's encoding lacks.
        stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    require_threads("quire", COMMAND_THREADS_MIN)
    try:
        from quire.cli.app import run
    except ModuleNotFoundError as error:
        if error.name not in {"typer", "rich", "click"}:
            raise
        print(
            f"quire: the command needs the package {error.name!r}: {how_to_install('cli')}",
            file=sys.stderr,
        )
        sys.exit(1)
    run()
