"""The parser of a server's command line."""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING, Final

from quire._distribution import VERSION

if TYPE_CHECKING:
    from _typeshed import SupportsWrite

FAILED: Final = 1


class Parser(argparse.ArgumentParser):
    """Parses a server's command line, and fails if help or version cannot be written. Argparse would ignore that."""

    def __init__(self, *, prog: str, description: str) -> None:
        super().__init__(prog=prog, description=description)
        self.add_argument("--version", action="version", version=f"{prog} {VERSION}")

    def _print_message(self, message: str, file: SupportsWrite[str] | None = None) -> None:
        """Writes a message, to standard error by default.

        Raises:
            SystemExit: with 1, help or version cannot be written. Prints nothing if the pipe's reader has exited.
        """
        if file is not sys.stdout:
            super()._print_message(message, file)
            return
        try:
            print(message, end="", flush=True)  # noqa: T201 - help and version are output
        except OSError as error:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Otherwise Python writes the rest again when it exits.
            said = "" if isinstance(error, BrokenPipeError) else f"{self.prog}: standard output: {error.strerror}\n"
            self.exit(FAILED, said)
