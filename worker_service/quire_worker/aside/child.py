"""The process that `job_processes` starts, run as a module: it forks a child for each connection that it receives.

1. prepared it imports and reads everything that all jobs need
2. forked     a child inherits the prepared state, and has one connection; its memory may grow by MEMORY_BYTES
3. a job      one message in, one message out; a child that takes too long is killed by its own alarms
4. ended      a child ends when its connection is closed, also because the process of `job_processes` ended

python -m quire_worker.aside.child KIND MEMORY_BYTES CPU_S WALL_S CONTROL_FD < configuration
"""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import struct
import sys
from typing import Any

from quire_worker.aside.jobs import Job, job_of, memory

LENGTH = struct.Struct("<I")
READY = b"r"
KEPT_BYTES_MAX = 16 << 20  # a child that has grown by more bytes than this is not reused


def main(arguments: list[str]) -> None:
    """Forks a child for each connection, until the control connection is closed."""
    kind, *limits, control_fd = arguments
    memory_bytes, cpu_s, wall_s = map(int, limits)
    # Ignores the signals that make a worker drain: the draining worker still needs this process. The worker ends this
    # process by closing the control connection.
    for ending in (signal.SIGINT, signal.SIGTERM):
        signal.signal(ending, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # lets the kernel reap the children
    os.nice(5)
    job = job_of(kind, json.load(sys.stdin))
    quiet = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):  # silences the standard streams: a library that aborts might print a caller's text
        os.dup2(quiet, number)
    with socket.socket(fileno=int(control_fd)) as control:
        control.sendall(READY)
        while True:
            data, descriptors, _, _ = socket.recv_fds(control, 1, 1)
            if not data:
                return
            if os.fork() == 0:
                control.close()
                _serve(socket.socket(fileno=descriptors[0]), job, memory_bytes, cpu_s, wall_s)
                os._exit(0)
            os.close(descriptors[0])


def _serve(connection: socket.socket, job: Job, memory_bytes: int, cpu_s: int, wall_s: int) -> None:
    size, resident = memory()
    resource.setrlimit(resource.RLIMIT_AS, (size + memory_bytes, size + memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for alarm in (signal.SIGPROF, signal.SIGALRM):
        signal.signal(alarm, signal.SIG_DFL)
    while True:
        head = _read(connection, LENGTH.size)
        if head is None:
            return
        given = _read(connection, LENGTH.unpack(head)[0])
        if given is None:
            return
        signal.setitimer(signal.ITIMER_PROF, cpu_s)
        signal.setitimer(signal.ITIMER_REAL, wall_s)
        found = _answer(job, json.loads(given))
        ends = memory().resident > resident + KEPT_BYTES_MAX  # a child that has grown has less memory for the next job
        answer = json.dumps({**found, "ends": ends}).encode()
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        connection.sendall(LENGTH.pack(len(answer)) + answer)
        if ends:
            return


def _answer(job: Job, given: Any) -> dict[str, Any]:
    try:
        return job(given)
    except MemoryError:
        os._exit(1)  # The caller gets OverLimitError, as if a library had aborted for lack of memory.
    except BaseException as error:
        return {"broken": type(error).__name__}


def _read(connection: socket.socket, count: int) -> bytes | None:
    """Reads `count` bytes; returns None if the connection was closed."""
    pieces = []
    while count:
        piece = connection.recv(min(count, 1 << 20))
        if not piece:
            return None
        pieces.append(piece)
        count -= len(piece)
    return b"".join(pieces)


if __name__ == "__main__":
    main(sys.argv[1:])
