"""The process that `bench` starts, run as a module: it forks a child for each connection that it is handed.

1. prepared   imports and whatever all jobs need are read once
2. forked     a child has all of that, and one connection; its memory may grow by so much
3. a job      a message in, a message out; a child that is not done in time is killed by its own alarms
4. ended      when its connection is closed, or with the process of `bench`

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
KEPT_BYTES_MAX = 16 << 20  # of a child that is used again


def main(arguments: list[str]) -> None:
    """Forks until the control connection is closed."""
    kind, *limits, control_fd = arguments
    memory_bytes, cpu_s, wall_s = map(int, limits)
    for ending in (signal.SIGINT, signal.SIGTERM):  # a worker that drains still needs it, and closes the connection
        signal.signal(ending, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the children
    os.nice(5)
    job = job_of(kind, json.load(sys.stdin))
    quiet = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):  # a library that aborts says why, and perhaps of what
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
        ends = memory().resident > resident + KEPT_BYTES_MAX  # it would have that much less for the next job
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
        os._exit(1)  # as where a library has none
    except BaseException as error:
        return {"broken": type(error).__name__}


def _read(connection: socket.socket, count: int) -> bytes | None:
    """Returns so many bytes; None where the connection was closed."""
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
