"""Runs an allocator, a worker and optionally a gateway on this machine, each as its own process.

    with LocalStack("models/demo") as stack, Client(stack.worker_address) as client:
        print(client.generate("The for statement").text)

Lifecycle:

    1. start    the processes start. Each process writes its addresses to its ready file once it serves
    2. serving  `poll` tells whether one of them has ended. `wait` restarts a dead allocator, and requests continue
    3. stop     first the gateway, then the worker, so that it can give its pool back, then the allocator. Each gets
                SIGTERM, and SIGKILL if it takes longer than its drain and a margin. Interrupting the wait (a second
                Ctrl-C) kills the server at once

No server outlives this process, even if this process is killed (`quire._child`). Each server has its own process
group, so Ctrl-C on a terminal reaches only this process, which then stops the servers in order.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Final, Self

from quire._transport.timeouts import checked_timeout
from quire.errors import InternalError, UsageError

POLL_S: Final = 0.05
DRAIN_S: Final = 30.0  # time for running calls to end after SIGTERM, same as the servers' default
DRAIN_S_MAX: Final = 86_400.0  # same as the servers' limit
LAST_S: Final = 2.0  # time for a server to exit after the drain
RESTARTS_MAX: Final = 5  # most restarts of an allocator within RESTARTS_S. More indicate a permanent fault.
RESTARTS_S: Final = 60.0
LOG_LINES: Final = 20


def _checked_drain(drain_timeout_s: float) -> float:
    """Returns a drain timeout within the servers' limit. Raises the same errors as `checked_timeout`."""
    return min(checked_timeout(drain_timeout_s, "drain_timeout_s"), DRAIN_S_MAX)


def grace_s(drain_timeout_s: float) -> float:
    """Returns the seconds after which a draining server is killed: twice its drain timeout."""
    return 2 * (drain_timeout_s + LAST_S)


class ServerFailedError(InternalError):
    """A server ended, or did not serve in time. If its log is a file, the message ends with the log's last lines."""

    def __str__(self) -> str:
        return self.message


def _opened(log: Path) -> BinaryIO:
    """Opens a log for appending. A link is not followed: other users can guess the file's name. A named pipe is opened
    only if it has a reader already.

    Raises:
        UsageError: it cannot be written.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        file = os.fdopen(os.open(log, flags, 0o644), "ab")
        os.set_blocking(file.fileno(), True)
        return file
    except OSError as error:
        raise UsageError(f"cannot write the log {log}: {error.strerror}") from None


class ServerProcess:
    """Runs one server of Quire as a child process.

    Args:
        module: the module that `python -m` runs.
        arguments: its command line, without --ready-file and --drain-timeout.
        folder: existing folder for its ready file.
        log: file for its output. None lets it write to this process's standard error.
        environment: variables in addition to this process's.
        drain_timeout_s: time for running calls to end after SIGTERM.
    """

    def __init__(
        self,
        module: str,
        arguments: Sequence[str],
        *,
        folder: Path,
        log: Path | None = None,
        environment: Mapping[str, str] | None = None,
        drain_timeout_s: float = DRAIN_S,
    ) -> None:
        self.module = module
        self._pid = os.getpid()
        drain_timeout_s = _checked_drain(drain_timeout_s)
        self._grace_s = grace_s(drain_timeout_s)
        self._log = log
        self._ready_file = folder / f"{module}.json"
        try:
            self._ready_file.unlink(missing_ok=True)  # An earlier server may have left its ready file.
        except OSError as error:
            raise UsageError(f"cannot replace the ready file {self._ready_file}: {error.strerror}") from None
        self._ready: dict[str, Any] = {}
        # Without -P, `-m` puts the current folder first on the path. A select.py in the current folder would replace
        # Python's own.
        command = [sys.executable, "-P", "-m", "quire._child", module, "--drain-timeout", str(drain_timeout_s)]
        command += [*arguments, "--ready-file", str(self._ready_file)]
        with contextlib.ExitStack() as files:
            output = files.enter_context(_opened(log)) if log is not None else sys.stderr.fileno()
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,  # the lifeline. Nothing is ever written to this pipe.
                stdout=output,
                stderr=output,
                env={**os.environ, **(environment or {})},
                start_new_session=True,
            )

    @property
    def address(self) -> str:
        """Returns the server's address, which is known once the server is ready."""
        return str(self._ready["address"])

    @property
    def metrics_address(self) -> str:
        """Returns the address of its /metrics, which is known once the server is ready."""
        return str(self._ready["metrics_address"])

    def wait_ready(self, *, deadline: float) -> None:
        """Waits until the server is ready.

        Args:
            deadline: a time of `time.monotonic`.

        Raises:
            ServerFailedError: the server ended, or the deadline has passed.
        """
        while not self._ready_file.exists():
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(POLL_S)
                raise self.failure()
            if time.monotonic() > deadline:
                raise ServerFailedError(f"{self.module} did not start to serve in time{self._log_tail()}")
        self._ready = json.loads(self._ready_file.read_text())

    def failure(self) -> ServerFailedError:
        """Returns the error for a server that has ended."""
        code = self.process.returncode
        how = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
        return ServerFailedError(f"{self.module} {how}{self._log_tail()}")

    def stop(self, *, grace_s: float | None = None) -> None:
        """Sends SIGTERM, and SIGKILL if the server has not ended after `grace_s` seconds or the wait is interrupted.

        By default `grace_s` is longer than the drain. Stopping twice is not an error. A forked child stops nothing.
        """
        if os.getpid() != self._pid:
            return
        self.process.terminate()
        try:
            self.process.wait(self._grace_s if grace_s is None else grace_s)
        except subprocess.TimeoutExpired:
            self._kill()
        except BaseException:
            self._kill()
            raise
        if self.process.stdin is not None:
            self.process.stdin.close()

    def _kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def _log_tail(self) -> str:
        if self._log is None:
            return ""
        with self._log.open(errors="replace") as lines:
            tail = "".join(deque(lines, LOG_LINES)).rstrip()
        return f"; the end of its log:\n{tail}" if tail else "; its log is empty"


def _remove(folder: Path, pid: int) -> None:
    """Removes a folder of the process `pid`. A forked child leaves it, unlike with a TemporaryDirectory."""
    if os.getpid() == pid:
        shutil.rmtree(folder, ignore_errors=True)


class LocalStack:
    """Runs an allocator, a worker that uses it, and optionally a gateway in front of the worker.

    Args:
        model: folder of the worker's model.
        allocator_listen: host:port or unix:///path. Here and below, port 0 takes any free port.
        allocator_metrics: host:port.
        worker_listen: host:port or unix:///path.
        worker_metrics: host:port.
        gateway_listen: host:port of OpenAI's endpoints; None starts no gateway.
        allocator_arguments: further command line of the allocator.
        worker_arguments: further command line of the worker.
        gateway_arguments: further command line of the gateway.
        log_folder: folder that keeps the logs. By default logs are deleted at the end.
        inherit_logs: lets the servers write to this process's standard error instead.
        start_timeout_s: time for all servers together to start. Loading a large model is slow.
        drain_timeout_s: time for each server's running calls to end after SIGTERM.
        on_progress: called with a text about each wait and each restart.

    Raises:
        InvalidArgumentError: a time is below 0, or not a number.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        allocator_listen: str = "127.0.0.1:0",
        allocator_metrics: str = "127.0.0.1:0",
        worker_listen: str = "127.0.0.1:0",
        worker_metrics: str = "127.0.0.1:0",
        gateway_listen: str | None = None,
        allocator_arguments: Sequence[str] = (),
        worker_arguments: Sequence[str] = (),
        gateway_arguments: Sequence[str] = (),
        log_folder: Path | None = None,
        inherit_logs: bool = False,
        start_timeout_s: float = 120.0,
        drain_timeout_s: float = DRAIN_S,
        on_progress: Callable[[str], None] = lambda _line: None,
    ) -> None:
        self._allocator_command = ["--listen", allocator_listen, "--metrics", allocator_metrics, *allocator_arguments]
        self._gateway_command = None if gateway_listen is None else ["--listen", gateway_listen, *gateway_arguments]
        self._worker_command = ["--model", str(model), "--listen", worker_listen, "--metrics", worker_metrics]
        self._worker_command += worker_arguments
        self._log_folder = log_folder
        self._inherit_logs = inherit_logs
        self._start_timeout_s = checked_timeout(start_timeout_s, "start_timeout_s")
        self._drain_timeout_s = _checked_drain(drain_timeout_s)
        self._on_progress = on_progress
        self._cleanup = contextlib.ExitStack()
        self._folder = Path()  # folder for ready files
        self._restarts_s: list[float] = []
        self.allocator: ServerProcess | None = None
        self.worker: ServerProcess | None = None
        self.gateway: ServerProcess | None = None

    @property
    def allocator_address(self) -> str:
        """Returns the allocator's address."""
        assert self.allocator is not None, "the stack is not started"
        return self.allocator.address

    @property
    def worker_address(self) -> str:
        """Returns the worker's address."""
        assert self.worker is not None, "the stack is not started"
        return self.worker.address

    @property
    def gateway_address(self) -> str:
        """Returns the gateway's address."""
        assert self.gateway is not None, "the stack has no gateway, or is not started"
        return self.gateway.address

    def start(self) -> None:
        """Starts all servers and waits until they are ready. After a failure, no server is left running.

        Raises:
            ServerFailedError: a server ended, or was not ready in time.
        """
        deadline = time.monotonic() + self._start_timeout_s
        with contextlib.ExitStack() as undo:
            folder = Path(tempfile.mkdtemp(prefix="quire-"))
            undo.callback(_remove, folder, os.getpid())
            self._on_progress("starting the allocator")
            self.allocator = self._spawn("quire_allocator", self._allocator_command, folder)
            undo.callback(self._stop_allocator)
            self.allocator.wait_ready(deadline=deadline)
            self._on_progress(
                f"allocator serves on {self.allocator.address}; starting the worker; a first start compiles kernels"
            )
            command = ["--allocator", self.allocator.address, *self._worker_command]
            # With PASSIVE, torch's threads sleep between two forward passes instead of spinning on the servers' cores.
            self.worker = self._spawn("quire_worker", command, folder, OMP_WAIT_POLICY="PASSIVE")
            undo.callback(self.worker.stop)  # Callbacks run in reverse order, so the worker stops before the allocator.
            self.worker.wait_ready(deadline=deadline)
            self._on_progress(f"worker serves on {self.worker.address}")
            if self._gateway_command is not None:
                behind = ["--worker", self.worker.address, "--allocator", self.allocator.address]
                self.gateway = self._spawn("quire_gateway", [*self._gateway_command, *behind], folder)
                undo.callback(self.gateway.stop)
                self.gateway.wait_ready(deadline=deadline)
                self._on_progress(f"gateway serves on http://{self.gateway.address}/v1")
            self._folder = folder
            self._cleanup = undo.pop_all()

    def poll(self) -> ServerFailedError | None:
        """Returns the error of a server that has ended; None while all run."""
        for server in (self.allocator, self.worker, self.gateway):
            if server is not None and server.process.poll() is not None:
                return server.failure()
        return None

    def wait(self) -> None:
        """Blocks while all servers run. If the allocator ends, it is restarted at the same address.

        A restart calls `on_progress`. The worker continues in the meantime, and reports its pages to the new allocator.

        Raises:
            ServerFailedError: the worker or the gateway has ended, or the allocator ends repeatedly.
        """
        assert self.worker is not None, "the stack is not started"
        while True:
            failure = self.poll()
            if failure is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.worker.process.wait(0.2)
            elif self._is_up(self.worker) and self._is_up(self.gateway):
                self._replace_allocator(failure)
            else:
                raise failure

    @staticmethod
    def _is_up(server: ServerProcess | None) -> bool:
        return server is None or server.process.poll() is None

    def _replace_allocator(self, failure: ServerFailedError) -> None:
        """Restarts an allocator that has ended.

        Raises:
            ServerFailedError: the allocator cannot be started, or has ended too often recently.
        """
        assert self.allocator is not None, "the stack is not started"
        now_s = time.monotonic()
        self._restarts_s = [*(at for at in self._restarts_s if now_s - at < RESTARTS_S), now_s]
        if len(self._restarts_s) > RESTARTS_MAX:
            raise failure
        listen, metrics = self.allocator.address, self.allocator.metrics_address
        self._on_progress(f"{str(failure).partition(';')[0]}; starting another one")
        command = [*self._allocator_command, "--listen", listen, "--metrics", metrics]
        self.allocator = self._spawn("quire_allocator", command, self._folder)
        self.allocator.wait_ready(deadline=now_s + self._start_timeout_s)
        self._on_progress(f"allocator serves on {self.allocator.address}")

    def _stop_allocator(self) -> None:
        """Stops the current allocator, which may be a restarted one."""
        assert self.allocator is not None, "the stack is not started"
        self.allocator.stop()

    def stop(self) -> None:
        """Stops all servers. Stopping twice is not an error."""
        self._cleanup.close()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _spawn(self, module: str, arguments: Sequence[str], folder: Path, **environment: str) -> ServerProcess:
        log = None if self._inherit_logs else (self._log_folder or folder) / f"{module}.log"
        return ServerProcess(
            module, arguments, folder=folder, log=log, environment=environment, drain_timeout_s=self._drain_timeout_s
        )
