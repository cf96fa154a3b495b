"""A server's process: its garbage collection, CPU, open files, signals, and ready file."""

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
    """Makes garbage collection rare, and excludes all existing objects from it. Call this once a server has started.

    A full collection stalls every stream, and would mostly scan objects that imports have created.
    """
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS_MAX)


def take_cpu(number: int) -> None:
    """Binds this process to one CPU, which no other process should use. Call this before any thread is started.

    If the system allows, the process also gets the batch scheduling class. Otherwise each arriving message wakes gRPC's
    thread, which interrupts the event loop only to wait for the interpreter's lock. With batch scheduling, each thread
    finishes its work first. Under load this takes a tenth of the context switches, and half the CPU per message.

    Raises:
        UsageError: the CPU does not exist, or this process may not use it.
    """
    try:
        os.sched_setaffinity(0, {number})
    except (OSError, ValueError, OverflowError):
        there = ", ".join(map(str, sorted(os.sched_getaffinity(0))))
        raise UsageError(f"CPU {number} is not available: this process may use {there}") from None
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def allow_open_files() -> int:
    """Raises this process's limit of open files as far as allowed, and returns it.

    Each connection takes one file descriptor. The usual limit of 1,024 would leave none for probes.
    """
    _, allowed = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, allowed))
    return allowed


def check_ready_file(path: str | None) -> None:
    """Checks that a ready file can be written, before a start that takes minutes. Does nothing if `path` is None.

    Raises:
        UsageError: the path is not a regular file, or its folder is missing or not writable.
    """
    if path is None:
        return
    target = Path(path)
    # Writing replaces the target with a new file. A server that runs as root would replace /dev/null for the whole
    # machine.
    if os.path.lexists(target) and (target.is_symlink() or not target.is_file()):
        raise UsageError(f"cannot write the ready file {path}: it exists and is not a regular file")
    if not os.access(target.parent, os.W_OK | os.X_OK):
        what = "not writable" if target.parent.is_dir() else "no folder"
        raise UsageError(f"cannot write the ready file {path}: {target.parent} is {what}")


def write_ready_file(path: str | None, **values: object) -> None:
    """Writes the addresses in use as JSON, atomically, for a supervisor. Does nothing if `path` is None.

    Raises:
        UsageError: the file cannot be written.
    """
    if path is None:
        return
    check_ready_file(path)
    # The name is random, so that no other user can have prepared a link under it.
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
        reload: called on SIGHUP. Without a reload handler, SIGHUP is ignored and never ends a server. Certificates need
            no reload: they are read at each handshake.
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
