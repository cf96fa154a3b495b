"""An allocator and a worker on this machine, and perhaps a gateway, as processes of their own.

    with LocalStack("models/demo") as stack, Client(stack.worker_address) as client:
        print(client.generate("The for statement").text)

Lifecycle:

    1. start    the processes are started; each says in a file of its own where it listens, once it serves
    2. serving  `poll` tells whether one of them has ended, `wait` starts a dead allocator again: texts go on meanwhile
    3. stop     the gateway first, then the worker, so that it can give its pool back, then the allocator: SIGTERM,
                and SIGKILL where a server takes longer than its drain's time and a margin. Who interrupts the wait
                (a second Ctrl-C) has the server killed at once

No process outlives this one, even if it is killed (`quire._child`). They form process groups of their own, so that
Ctrl-C on a terminal reaches this process alone, which then stops them in order.
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
from typing import Any, Final, Self

from quire._transport.timeouts import checked_timeout
from quire.errors import InternalError

POLL_S: Final = 0.05
DRAIN_S: Final = 30.0  # time for running calls to end after SIGTERM, same as the servers' default
DRAIN_S_MAX: Final = 86_400.0  # same as the servers' limit
LAST_S: Final = 2.0  # time for a server to exit after the drain
RESTARTS_MAX: Final = 5  # restarts of an allocator within RESTARTS_S. More indicate a permanent fault.
RESTARTS_S: Final = 60.0
LOG_LINES: Final = 20


def _checked_drain(drain_timeout_s: float) -> float:
    """Returns a time that servers take; raises as `checked_timeout` does."""
    return min(checked_timeout(drain_timeout_s, "drain_timeout_s"), DRAIN_S_MAX)


def grace_s(drain_timeout_s: float) -> float:
    """Seconds after which a server that drains for so many is killed: twice what it may take."""
    return 2 * (drain_timeout_s + LAST_S)


class ServerFailedError(InternalError):
    """A server ended, or did not serve in time. The message ends with the last lines of its log, if that is a file."""

    def __str__(self) -> str:
        return self.message


class ServerProcess:
    """One server of Quire as a child process.

    Args:
        module: what `python -m` runs.
        arguments: its command line, without --ready-file and --drain-timeout.
        folder: where its ready file goes; exists.
        log: file for its output; None lets it write to our standard error.
        environment: set in addition to our own.
        drain_timeout_s: for calls under way when it is told to stop.
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
        self._ready_file.unlink(missing_ok=True)  # An earlier server may have left its file.
        self._ready: dict[str, Any] = {}
        # Without -P, `-m` puts the current folder first on the path. A select.py there would replace Python's own.
        command = [sys.executable, "-P", "-m", "quire._child", module, "--drain-timeout", str(drain_timeout_s)]
        command += [*arguments, "--ready-file", str(self._ready_file)]
        with contextlib.ExitStack() as files:
            output = files.enter_context(log.open("ab")) if log is not None else sys.stderr.fileno()
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,  # the lifeline. Nothing is ever written to it.
                stdout=output,
                stderr=output,
                env={**os.environ, **(environment or {})},
                start_new_session=True,
            )

    @property
    def address(self) -> str:
        """Returns where it serves; known once it is ready."""
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

    def stop(self, *, grace_s: float | None = None) -> None:
        """Sends SIGTERM, and SIGKILL if it has not ended after `grace_s` seconds, by default more than its drain may
        take, or if the wait is interrupted. Stopping twice is no error; a forked child stops nothing."""
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
    """Removes a folder of the process `pid`; a forked child, at whose end a TemporaryDirectory would go, leaves it."""
    if os.getpid() == pid:
        shutil.rmtree(folder, ignore_errors=True)


class LocalStack:
    """An allocator, a worker that uses it, and a gateway in front of that where one is wanted.

    Args:
        model: folder of the worker's model.
        allocator_listen: host:port or unix:///path; port 0 takes any free one, here and below.
        allocator_metrics: host:port.
        worker_listen: host:port or unix:///path.
        worker_metrics: host:port.
        gateway_listen: host:port of OpenAI's endpoints; None starts no gateway.
        allocator_arguments: further command line of the allocator.
        worker_arguments: further command line of the worker.
        gateway_arguments: further command line of the gateway.
        log_folder: where their logs are kept; by default they are thrown away at the end.
        inherit_logs: lets them write to our standard error instead.
        start_timeout_s: for all together; loading a large model takes its time.
        drain_timeout_s: for calls under way when they are told to stop, of each.
        on_progress: told what is being waited for, and what was started again.

    Raises:
        InvalidArgumentError: a time is less than 0, or no number.
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
        """Returns where the allocator serves."""
        assert self.allocator is not None, "the stack is not started"
        return self.allocator.address

    @property
    def worker_address(self) -> str:
        """Returns where the worker serves."""
        assert self.worker is not None, "the stack is not started"
        return self.worker.address

    @property
    def gateway_address(self) -> str:
        """Returns where the gateway serves."""
        assert self.gateway is not None, "the stack has no gateway, or is not started"
        return self.gateway.address

    def start(self) -> None:
        """Starts all servers and waits until they serve; after a failure, nothing is left behind.

        Raises:
            ServerFailedError: one of them ended or did not serve in time.
        """
        deadline = time.monotonic() + self._start_timeout_s
        with contextlib.ExitStack() as undo:
            folder = Path(tempfile.mkdtemp(prefix="quire-"))
            undo.callback(_remove, folder, os.getpid())
            self._on_progress("starting the allocator")
            self.allocator = self._spawn("quire_allocator", self._allocator_command, folder)
            undo.callback(self._stop_allocator)
            self.allocator.wait_ready(deadline=deadline)
            self._on_progress(f"allocator serves on {self.allocator.address}; starting the worker")
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
        """Returns what to raise if one of them has ended; None while all run."""
        for server in (self.allocator, self.worker, self.gateway):
            if server is not None and server.process.poll() is not None:
                return server.failure()
        return None

    def wait(self) -> None:
        """Blocks while all run. An allocator that has ended is started again where it was, and tells `on_progress`: the
        worker goes on meanwhile, and reports to the next one what its pages hold.

        Raises:
            ServerFailedError: worker or gateway have ended, or the allocator does again and again.
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
        """Starts another allocator in the place of one that has ended.

        Raises:
            ServerFailedError: it cannot be started, or has ended too often of late.
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
        """Stops the allocator that there is by then."""
        assert self.allocator is not None, "the stack is not started"
        self.allocator.stop()

    def stop(self) -> None:
        """Stops all; stopping twice is no error."""
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
