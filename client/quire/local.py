"""An allocator and a worker on this machine, as processes of their own.

    with LocalStack("models/demo") as stack, Client(stack.worker_address) as client:
        print(client.generate("The for statement").text)

Lifecycle:

    1. start    both processes are started; each says in a file of its own where it listens, once it serves
    2. serving  `poll` tells whether one of them has ended
    3. stop     the worker first, so that it can give its pool back, then the allocator: SIGTERM, after a while SIGKILL

Neither process outlives this one, even if it is killed (`quire._child`). They form process groups of their own, so that
Ctrl-C on a terminal reaches this process alone, which then stops them in order.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Self

POLL_S: Final = 0.05
GRACE_S: Final = 15.0  # a server that drains takes 5 s for its calls and up to 2 s more
LOG_LINES: Final = 20


class ServerFailedError(Exception):
    """A server ended, or did not serve in time. The message ends with the last lines of its log, if that is a file."""


class ServerProcess:
    """One server of Quire as a child process.

    Args:
        module: what `python -m` runs.
        arguments: its command line, without --ready-file.
        folder: where its ready file goes; exists.
        log: file for its output; None lets it write to our standard error.
        environment: set in addition to our own.
    """

    def __init__(
        self,
        module: str,
        arguments: Sequence[str],
        *,
        folder: Path,
        log: Path | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.module = module
        self._log = log
        self._ready_file = folder / f"{module}.json"
        self._ready_file.unlink(missing_ok=True)  # of a server that was there before
        self._ready: dict[str, Any] = {}
        command = [sys.executable, "-m", "quire._child", module, *arguments, "--ready-file", str(self._ready_file)]
        with contextlib.ExitStack() as files:
            output = files.enter_context(log.open("ab")) if log is not None else sys.stderr.fileno()
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,  # the lifeline; nothing is ever written
                stdout=output,
                stderr=output,
                env={**os.environ, **(environment or {})},
                start_new_session=True,
            )

    @property
    def address(self) -> str:
        """Returns where it serves gRPC; known once it is ready."""
        return str(self._ready["address"])

    @property
    def metrics_address(self) -> str:
        """Returns where it serves /metrics; known once it is ready."""
        return str(self._ready["metrics_address"])

    def wait_ready(self, *, deadline: float) -> None:
        """Waits until it serves.

        Args:
            deadline: on the scale of `time.monotonic`.

        Raises:
            ServerFailedError: it ended, or the deadline has passed.
        """
        while not self._ready_file.exists():
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(POLL_S)
                raise self.failure()
            if time.monotonic() > deadline:
                raise ServerFailedError(f"{self.module} does not serve in time{self._log_tail()}")
        self._ready = json.loads(self._ready_file.read_text())

    def failure(self) -> ServerFailedError:
        """Returns what to raise where it has ended."""
        code = self.process.returncode
        how = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
        return ServerFailedError(f"{self.module} {how}{self._log_tail()}")

    def stop(self, *, grace_s: float = GRACE_S) -> None:
        """Sends SIGTERM, and SIGKILL if it has not ended after `grace_s` seconds. Stopping twice is no error."""
        self.process.terminate()
        try:
            self.process.wait(grace_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        if self.process.stdin is not None:
            self.process.stdin.close()

    def _log_tail(self) -> str:
        if self._log is None:
            return ""
        with self._log.open(errors="replace") as lines:
            tail = "".join(deque(lines, LOG_LINES)).rstrip()
        return f"; the end of its log:\n{tail}" if tail else "; its log is empty"


class LocalStack:
    """An allocator and a worker that uses it.

    Args:
        model: folder of the worker's model.
        allocator_listen: host:port or unix:///path; port 0 takes any free one, here and below.
        allocator_metrics: host:port.
        worker_listen: host:port or unix:///path.
        worker_metrics: host:port.
        allocator_arguments: further command line of the allocator.
        worker_arguments: further command line of the worker.
        log_folder: where their logs are kept; by default they are thrown away at the end.
        inherit_logs: lets them write to our standard error instead.
        start_timeout_s: for both together; loading a large model takes its time.
        on_progress: told what is being waited for.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        allocator_listen: str = "127.0.0.1:0",
        allocator_metrics: str = "127.0.0.1:0",
        worker_listen: str = "127.0.0.1:0",
        worker_metrics: str = "127.0.0.1:0",
        allocator_arguments: Sequence[str] = (),
        worker_arguments: Sequence[str] = (),
        log_folder: Path | None = None,
        inherit_logs: bool = False,
        start_timeout_s: float = 120.0,
        on_progress: Callable[[str], None] = lambda _line: None,
    ) -> None:
        self._allocator_command = ["--listen", allocator_listen, "--metrics", allocator_metrics, *allocator_arguments]
        self._worker_command = ["--model", str(model), "--listen", worker_listen, "--metrics", worker_metrics]
        self._worker_command += worker_arguments
        self._log_folder = log_folder
        self._inherit_logs = inherit_logs
        self._start_timeout_s = start_timeout_s
        self._on_progress = on_progress
        self._cleanup = contextlib.ExitStack()
        self.allocator: ServerProcess | None = None
        self.worker: ServerProcess | None = None

    @property
    def allocator_address(self) -> str:
        """Returns where the allocator serves."""
        assert self.allocator is not None, "the stack is not started"
        return self.allocator.address

    @property
    def worker_address(self) -> str:
        """Returns where the worker serves."""
        assert self.worker is not None, "the stack is not started"
        return self.worker.address

    def start(self) -> None:
        """Starts both and waits until they serve; whatever goes wrong, nothing is left behind.

        Raises:
            ServerFailedError: one of them ended or did not serve in time.
        """
        deadline = time.monotonic() + self._start_timeout_s
        with contextlib.ExitStack() as undo:
            folder = Path(undo.enter_context(tempfile.TemporaryDirectory(prefix="quire-")))
            self._on_progress("starting the allocator")
            self.allocator = self._spawn("quire_allocator", self._allocator_command, folder)
            undo.callback(self.allocator.stop)
            self.allocator.wait_ready(deadline=deadline)
            self._on_progress(f"allocator serves on {self.allocator.address}; starting the worker")
            command = ["--allocator", self.allocator.address, *self._worker_command]
            # PASSIVE: torch's threads sleep between two forward passes instead of spinning on the servers' cores.
            self.worker = self._spawn("quire_worker", command, folder, OMP_WAIT_POLICY="PASSIVE")
            undo.callback(self.worker.stop)  # undone in reverse order: the worker stops first
            self.worker.wait_ready(deadline=deadline)
            self._on_progress(f"worker serves on {self.worker.address}")
            self._cleanup = undo.pop_all()

    def poll(self) -> ServerFailedError | None:
        """Returns what to raise if one of the two has ended; None while both run."""
        for server in (self.allocator, self.worker):
            if server is not None and server.process.poll() is not None:
                return server.failure()
        return None

    def wait(self) -> None:
        """Blocks while both run.

        Raises:
            ServerFailedError: one of them has ended.
        """
        assert self.worker is not None, "the stack is not started"
        while (failure := self.poll()) is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.worker.process.wait(0.5)
        raise failure

    def stop(self) -> None:
        """Stops both; stopping twice is no error."""
        self._cleanup.close()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _spawn(self, module: str, arguments: Sequence[str], folder: Path, **environment: str) -> ServerProcess:
        log = None if self._inherit_logs else (self._log_folder or folder) / f"{module}.log"
        return ServerProcess(module, arguments, folder=folder, log=log, environment=environment)
