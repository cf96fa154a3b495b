"""A server as a process: secret files, signals, and the file that says it is ready."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import stat
from pathlib import Path

TOKEN_CHARACTERS_MIN = 16


class UsageError(Exception):
    """The command line, a file that it names or the environment is wrong; the process says so and exits with 2."""


def require_private(path: str | Path, what: str) -> None:
    """Refuses a secret that every user of this machine can read. Its group may: that is how containers share one.

    Raises:
        UsageError: it can be read or written by others, or is not there.
    """
    try:
        mode = stat.S_IMODE(os.stat(path).st_mode)
    except OSError as error:
        raise UsageError(f"{what} {path}: {error.strerror}") from None
    if mode & stat.S_IRWXO:
        raise UsageError(f"{what} {path}: its mode {mode:04o} lets every user of this machine in; chmod o= {path}")


def read_token(path: str | None) -> str | None:
    """The bearer token in a file, without surrounding white space; None without a path.

    Raises:
        UsageError: the file cannot be read, or everybody can read it; its token is too short or not printable ASCII.
    """
    if path is None:
        return None
    require_private(path, "token file")
    try:
        token = Path(path).read_text(encoding="ascii").strip()
    except UnicodeDecodeError:  # whose text would show what is in the file
        token = ""
    except OSError as error:
        raise UsageError(f"token file {path}: {error.strerror}") from None
    if len(token) < TOKEN_CHARACTERS_MIN or not token.isprintable() or " " in token:
        raise UsageError(f"token file {path}: a token has at least {TOKEN_CHARACTERS_MIN} printable ASCII characters")
    return token


def take_cpu(number: int) -> None:
    """Runs on that CPU alone, which this process should have for itself. To be called before any thread is started.

    As a batch process, too, where the system lets it: a message that arrives wakes gRPC's thread, and that would
    interrupt the event loop, only to wait for the interpreter's lock. Where nobody interrupts, each of the two finishes
    what there is to do: under load an order of magnitude fewer context switches, and half the CPU for each message.

    Raises:
        UsageError: there is no such CPU, or this process may not use it.
    """
    try:
        os.sched_setaffinity(0, {number})
    except (OSError, ValueError, OverflowError) as error:
        raise UsageError(f"CPU {number} is not to be had: {error}") from None
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def write_ready_file(path: str | None, **values: object) -> None:
    """Tells a supervisor the addresses in use, as JSON, in one atomic step; nothing without a path.

    Raises:
        UsageError: the file cannot be written.
    """
    if path is None:
        return
    temporary = Path(f"{path}.{os.getpid()}")
    try:
        temporary.write_text(json.dumps({**values, "pid": os.getpid()}))
        temporary.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise UsageError(f"cannot write the ready file {path}: {error.strerror}") from None


def stop_event() -> asyncio.Event:
    """An event that SIGTERM and SIGINT set."""
    event = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, event.set)
    return event
