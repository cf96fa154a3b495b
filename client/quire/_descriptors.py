"""Standard streams, open files and threads of a process, checked before much is loaded."""

from __future__ import annotations

import contextlib
import io
import os
import resource
import sys
import threading
from typing import Final

OPEN_FILES_MIN: Final = 64  # A server without callers has 24 to 32 open files.
# gRPC starts one thread per CPU, at least 4 and at most 16. gRPC aborts the process if one of them cannot be started.
_GRPC_THREADS: Final = min(max(os.cpu_count() or 1, 4), 16)
SERVER_THREADS_MIN: Final = _GRPC_THREADS + 7
COMMAND_THREADS_MIN: Final = _GRPC_THREADS + 3
_STACK_BYTES: Final = 128 << 10
USAGE: Final = 2


class _Complaints(io.TextIOWrapper):
    """Standard error that drops text if writing fails: the exit code still reports the error."""

    def write(self, text: str) -> int:
        """Writes a text, or drops it if that fails."""
        with contextlib.suppress(OSError):
            super().write(text)
        return len(text)

    def flush(self) -> None:
        """Writes all buffered text, or drops it if that fails."""
        with contextlib.suppress(OSError):
            super().flush()


def open_missing() -> None:
    """Opens /dev/null for each closed standard stream, and makes writes to standard error never fail.

    Otherwise the next socket or file gets a closed stream's number, and libraries that write to standard error write
    into it. Call this before anything else is opened.
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
    """Raises the limit of open files as far as the system allows, before a server's modules are loaded.

    Args:
        program: the program's name, for the message.

    Raises:
        SystemExit: with 2, the system allows too few open files.
    """
    _, allowed = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= allowed < OPEN_FILES_MIN:  # A negative value means unlimited.
        what = f"this process may open {allowed} files, but a server needs at least {OPEN_FILES_MIN}"
        sys.stderr.write(f"{program}: {what}: raise the limit (ulimit -n)\n")
        sys.exit(USAGE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, allowed))


def require_threads(program: str, count: int) -> None:
    """Checks that this process can start threads. Without threads, libraries in C abort or crash without a message.

    Args:
        program: the program's name, for the message.
        count: the least number of threads that the process needs.

    Raises:
        SystemExit: with 2, the system allows too few.
    """
    started: list[threading.Thread] = []
    end = threading.Event()
    before = threading.stack_size(_STACK_BYTES)  # With the default size, each thread needs 8 MiB of address space.
    try:
        while len(started) < count:
            thread = threading.Thread(target=end.wait, daemon=True)
            thread.start()
            started.append(thread)
    except RuntimeError:
        what = f"this process may start {len(started)} threads, but it needs at least {count}"
        sys.stderr.write(f"{program}: {what}: raise the limit (ulimit -u, or pids.max of its control group)\n")
        sys.exit(USAGE)
    finally:
        threading.stack_size(before)
        end.set()
        for thread in started:
            thread.join()
