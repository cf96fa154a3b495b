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

    def add_renamed(self, old: str, new: str) -> None:
        """Refuses an option's old name. The error has the new name."""
        self.add_argument(
            old, action=_Renamed, const=new, dest=f"no {old}", nargs="?", default=argparse.SUPPRESS,
            help=argparse.SUPPRESS,
        )  # fmt: skip

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
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # At exit, Python writes the rest again, to /dev/null.
            said = "" if isinstance(error, BrokenPipeError) else f"{self.prog}: standard output: {error.strerror}\n"
            self.exit(FAILED, said)


class _Renamed(argparse.Action):
    """The old name of an option; `const` is the new one."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object, **__: object) -> None:
        """Ends the program with status 2."""
        parser.error(f"there is no option {self.option_strings[0]}: it is called {self.const}")
