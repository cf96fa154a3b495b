"""Open files of a process: standard streams that its parent has closed or filled up, and how many there may be."""

from __future__ import annotations

import contextlib
import io
import os
import resource
import sys
from typing import Final

OPEN_FILES_MIN: Final = 64  # a server without callers has 24 to 32 open
USAGE: Final = 2


class _Complaints(io.TextIOWrapper):
    """Standard error, which drops text that the system refuses: the exit code still says what went wrong."""

    def write(self, text: str) -> int:
        """Writes a text, or drops it."""
        with contextlib.suppress(OSError):
            super().write(text)
        return len(text)

    def flush(self) -> None:
        """Writes all of it, or drops it."""
        with contextlib.suppress(OSError):
            super().flush()


def open_missing() -> None:
    """Puts /dev/null in the place of standard streams that are closed, and makes standard error never fail.

    Otherwise the first socket or file that is opened gets their numbers, and then libraries that write to "standard
    error" write into it. Call this before anything else is opened.
    """
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # os.open returns the lowest free number, which is the missing stream's.
    if sys.stdout is None:  # Python sets None if the stream was closed at startup.
        sys.stdout = os.fdopen(1, "w", closefd=False)
    if sys.stderr is None or sys.stderr is sys.__stderr__:
        encoding = None if sys.stderr is None else sys.stderr.encoding
        binary = os.fdopen(2, "wb", closefd=False)
        sys.stderr = _Complaints(binary, encoding, "backslashreplace", line_buffering=True)


def require_open_files(program: str) -> None:
    """Lets a server have as many open files as it may, before its modules are opened.

    Args:
        program: named in the message.

    Raises:
        SystemExit: with 2, as it may have too few.
    """
    _, allowed = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= allowed < OPEN_FILES_MIN:  # A negative value means unlimited.
        what = f"{allowed} files may be open, and a server needs {OPEN_FILES_MIN} or more"
        sys.stderr.write(f"{program}: {what}: raise the limit (ulimit -n)\n")
        sys.exit(USAGE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, allowed))
