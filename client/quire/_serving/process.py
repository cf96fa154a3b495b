"""A server as a process: its CPU, its signals, and the file that says it is ready."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import resource
import secrets
import signal
from collections.abc import Callable
from pathlib import Path

import structlog

from quire.errors import UsageError

log = structlog.get_logger()

# The garbage collector looks for cycles after this many new objects. A server creates almost no cycles.
YOUNG_OBJECTS_MAX = 50_000


def collect_garbage_rarely() -> None:
    """Leaves out of every garbage collection what is there now, once a server has been started.

    A full collection stalls every stream, and most of what it would look at are the objects that imports have made.
    """
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS_MAX)


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
    except (OSError, ValueError, OverflowError):
        there = ", ".join(map(str, sorted(os.sched_getaffinity(0))))
        raise UsageError(f"CPU {number} is not to be had: this process may use {there}") from None
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def allow_open_files() -> int:
    """Lets this process have as many open files as it may, and returns that number: connections take one each, and the
    usual limit of 1,024 would leave none for probes."""
    _, allowed = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, allowed))
    return allowed


def check_ready_file(path: str | None) -> None:
    """Looks whether a ready file can be written, before what takes minutes; does nothing without a path.

    Raises:
        UsageError: something else than a file is there, or its folder is missing or closed to this user.
    """
    if path is None:
        return
    target = Path(path)
    # Writing replaces the target by a new file. As root that would replace /dev/null for the whole machine.
    if os.path.lexists(target) and (target.is_symlink() or not target.is_file()):
        raise UsageError(f"cannot write the ready file {path}: there is something that is no regular file")
    if not os.access(target.parent, os.W_OK | os.X_OK):
        what = "not writable" if target.parent.is_dir() else "no folder"
        raise UsageError(f"cannot write the ready file {path}: {target.parent} is {what}")


def write_ready_file(path: str | None, **values: object) -> None:
    """Tells a supervisor the addresses in use, as JSON, in one atomic step; nothing without a path.

    Raises:
        UsageError: the file cannot be written.
    """
    if path is None:
        return
    check_ready_file(path)
    # The name is random, so that nobody can have prepared a link under it.
    temporary = Path(f"{path}.{secrets.token_hex(8)}")
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        with os.fdopen(os.open(temporary, flags, 0o644), "w") as file:
            json.dump({**values, "pid": os.getpid()}, file)
        temporary.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise UsageError(f"cannot write the ready file {path}: {error.strerror}") from None


def stop_event(reload: Callable[[], None] | None = None) -> asyncio.Event:
    """Returns an event that SIGTERM and SIGINT set.

    Args:
        reload: called on SIGHUP, which never ends a server: also where there is nothing to read again, as certificates
            are read at each handshake.
    """
    event = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, event.set)

    def hang_up() -> None:
        log.info("SIGHUP", reads_again=reload is not None)
        if reload is not None:
            reload()

    loop.add_signal_handler(signal.SIGHUP, hang_up)
    return event
