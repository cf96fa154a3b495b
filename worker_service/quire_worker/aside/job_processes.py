"""Processes for jobs that might never end, with enforced limits of time and memory.

1. started    by the first job or `warm`: one process is prepared, and forks children
2. idle       a child waits for a job; there are at most `places` children, and they are reused
3. busy       a child computes a job; at most one job of each key. If the caller stops waiting, the job continues
4. lost       the child's limits killed it; the next job gets a new child
5. closed     all processes end
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from quire.errors import QuireError, Reason

from quire_worker.aside.child import LENGTH

ANSWER_BYTES_MAX = 64 << 20
WAITING_MAX = 256  # most jobs that wait or run
START_S_MAX = 60.0


class OverLimitError(Exception):
    """A job was not done within its limits."""


class JobLimits(NamedTuple):
    """Limits of one job, and the number of children.

    Attributes:
        memory_bytes: memory that a child may use beyond its size when it was forked.
        cpu_s: CPU time, in whole seconds.
        wall_s: elapsed time, in whole seconds; this limit ends a job that gets too little CPU time.
        places: number of children, and thus of simultaneous jobs.
    """

    memory_bytes: int
    cpu_s: int
    wall_s: int
    places: int = 2


class _Child(NamedTuple):
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter


@dataclass(slots=True)
class _Turn:
    """The queue of one key: its jobs run one after another."""

    lock: asyncio.Lock
    job_count: int = 0


class JobProcesses:
    """Runs jobs of one kind in child processes. Only the event loop may use this."""

    def __init__(self, kind: str, configuration: Callable[[], Any], limits: JobLimits) -> None:
        """Starts nothing yet; the first job or `warm` starts the process.

        Args:
            kind: a kind of `jobs`.
            configuration: returns the data that prepares the process; called on a thread.
            limits: limits of each job.
        """
        self._kind, self._configuration, self._limits = kind, configuration, limits
        self._starting = asyncio.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._idle: list[_Child] = []
        self._places = asyncio.Semaphore(limits.places)
        self._turns: dict[str, _Turn] = {}
        self._jobs: set[asyncio.Task[Any]] = set()
        self._is_closed = False

    async def run(self, job: Any, *, key: str, timeout_s: float) -> dict[str, Any]:
        """Returns the answer to a job.

        Args:
            job: the job's input, in JSON's types.
            key: jobs with the same key run one at a time, so that no caller occupies all places.
            timeout_s: seconds to wait for the answer.

        Raises:
            TimeoutError: the job was not done within `timeout_s`.
            OverLimitError: the job exceeded its limits.
            QuireError: QUEUE_FULL, too many jobs wait already.
        """
        if len(self._jobs) >= WAITING_MAX:
            raise QuireError.of(
                Reason.QUEUE_FULL, f"the queue of {self._kind} is full ({WAITING_MAX} wait); try again later"
            )
        task = asyncio.create_task(self._in_its_turn(json.dumps(job).encode(), key))
        self._jobs.add(task)
        task.add_done_callback(self._jobs.discard)
        # The caller may have stopped waiting. Reading the exception keeps asyncio from logging a warning.
        task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        return await asyncio.wait_for(asyncio.shield(task), timeout_s)

    async def warm(self) -> None:
        """Starts the process, so that the first job need not wait for it."""
        async with self._starting:
            if self._control is None:
                await self._start()

    def close(self) -> None:
        """Ends all processes. No job may be started afterwards."""
        self._is_closed = True
        for task in self._jobs:
            task.cancel()
        self._end()

    def _end(self) -> None:
        for child in self._idle:
            child.writer.transport.abort()
        self._idle.clear()
        if self._control is not None:
            self._control.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._control = self._process = None

    async def _in_its_turn(self, job: bytes, key: str) -> dict[str, Any]:
        turn = self._turns.setdefault(key, _Turn(asyncio.Lock()))
        turn.job_count += 1
        try:
            async with turn.lock, self._places:
                return await self._done(job)
        finally:
            turn.job_count -= 1
            if not turn.job_count:
                del self._turns[key]

    async def _done(self, job: bytes) -> dict[str, Any]:
        """Returns the answer of a child to a job: of an idle child if one is alive, else of a new child."""
        while self._idle:
            child = self._idle.pop()
            if not child.reader.at_eof():
                return await self._answer(child, job)
            child.writer.transport.abort()
        return await self._answer(await self._forked(), job)

    async def _answer(self, child: _Child, job: bytes) -> dict[str, Any]:
        try:
            child.writer.write(LENGTH.pack(len(job)) + job)
            head = await child.reader.readexactly(LENGTH.size)
            answer = await child.reader.readexactly(min(LENGTH.unpack(head)[0], ANSWER_BYTES_MAX))
        except (asyncio.IncompleteReadError, OSError):
            child.writer.transport.abort()
            raise OverLimitError from None
        except asyncio.CancelledError:  # `close` cancelled this task
            child.writer.transport.abort()
            raise
        found: dict[str, Any] = json.loads(answer)
        if found.pop("ends"):
            child.writer.transport.abort()
        else:
            self._idle.append(child)
        return found

    async def _forked(self) -> _Child:
        await self.warm()
        assert self._control is not None
        own, its = socket.socketpair()
        try:
            socket.send_fds(self._control, [b"f"], [its.fileno()])
        except OSError:  # the process was killed, perhaps because the system lacks memory
            self._end()
            await self.warm()
            socket.send_fds(self._control, [b"f"], [its.fileno()])
        finally:
            its.close()
        return _Child(*await asyncio.open_connection(sock=own, limit=1 << 20))

    async def _start(self) -> None:
        if self._is_closed:
            raise OverLimitError
        own, its = socket.socketpair()
        own.setblocking(False)
        with its:
            self._process = await asyncio.to_thread(self._popen, its.fileno())
        try:
            loop = asyncio.get_running_loop()
            is_ready = await asyncio.wait_for(loop.sock_recv(own, 1), START_S_MAX)
        except TimeoutError:
            is_ready = b""
        if not is_ready:
            own.close()
            self._end()
            raise ChildProcessError(f"the process for {self._kind} did not start")
        own.setblocking(True)  # sends block only briefly: the process reads each message, one byte, immediately
        self._control = own

    def _popen(self, control: int) -> subprocess.Popen[bytes]:
        limits = self._limits
        numbers = map(str, (limits.memory_bytes, limits.cpu_s, limits.wall_s, control))
        command = [sys.executable, "-P", "-m", "quire_worker.aside.child", self._kind, *numbers]
        paths = os.pathsep.join(path for path in sys.path if path)
        environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1"}
        with tempfile.TemporaryFile("w+", encoding="utf-8") as file:
            json.dump(self._configuration(), file)
            file.seek(0)
            return subprocess.Popen(command, stdin=file, pass_fds=(control,), env=environment, start_new_session=True)
