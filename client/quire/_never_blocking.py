"""Standard output and error of a server, and of `quire up`: a write returns at once and never fails.

The process that reads a server's output may stop reading, end, or write to a full disk. None of that may stop the
server. So text is queued, and only a separate thread writes to the file. If the queue is full or writing fails, the
text is dropped and counted.

C libraries write to the descriptor directly. Messages that any remote caller could make gRPC write are silenced
(`quire._transport.grpc_io`).
"""

from __future__ import annotations

import atexit
import contextlib
import io
import os
import queue
import select
import sys
import threading
from collections.abc import Iterator
from typing import Any, Final

BYTES_MAX: Final = 1 << 20  # most bytes of queued text
LAST_S: Final = 1.0  # time for writing queued text when the process ends


class NeverBlockingText(io.TextIOBase):
    """Writes text to a descriptor from a separate thread. The first text starts the thread.

    A forked child starts with an empty queue and its own thread.

    Args:
        descriptor: the file descriptor to write to. The file is never closed.

    Attributes:
        dropped_line_count: number of dropped lines.
    """

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self._descriptor = descriptor
        self.dropped_line_count = 0
        self._begin()
        os.register_at_fork(after_in_child=self._begin)

    def _begin(self) -> None:
        self._lock = threading.RLock()  # Reentrant, because a thread that writes may also write a Python warning.
        self._texts: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._waiting_bytes = 0
        self._empty = threading.Event()
        self._empty.set()
        self._thread: threading.Thread | None = None

    encoding = "utf-8"
    errors = "backslashreplace"

    def write(self, text: str) -> int:
        """Queues a text, or drops it if the queue is full."""
        data = text.encode(errors="backslashreplace")
        with self._lock:
            if not data:
                return 0
            if self._waiting_bytes + len(data) > BYTES_MAX:
                self._drop(data)
                return len(text)
            if not self._waiting_bytes:  # While bytes are queued, `_empty` is cleared already.
                self._empty.clear()
            self._waiting_bytes += len(data)
            self._texts.put(data)
            if self._thread is None:
                thread = threading.Thread(target=self._write_all, name="standard streams", daemon=True)
                with contextlib.suppress(RuntimeError):  # If no thread can be started now, the next write tries again.
                    thread.start()
                    self._thread = thread
        return len(text)

    def flush(self) -> None:
        """Does nothing, because print and loggers flush after each line."""

    def writable(self) -> bool:
        """Returns True: the stream can be written to."""
        return True

    def fileno(self) -> int:
        """Returns the file descriptor of the stream."""
        return self._descriptor

    def isatty(self) -> bool:
        """Tells whether the descriptor is a terminal."""
        return os.isatty(self._descriptor)

    def wait_empty(self, timeout_s: float) -> bool:
        """Waits until all text is written or dropped. Returns False if that takes longer than `timeout_s`."""
        return self._empty.wait(timeout_s)

    def _drop(self, data: bytes) -> None:
        self.dropped_line_count += max(1, data.count(b"\n"))

    def _write_all(self) -> None:
        texts = self._texts
        while True:
            data = texts.get()
            try:
                self._write_whole(data)
            except OSError:
                with self._lock:
                    self._drop(data)
            with self._lock:
                self._waiting_bytes -= len(data)
                if not self._waiting_bytes:
                    self._empty.set()

    def _write_whole(self, data: bytes) -> None:
        """Writes all the data, however slow the reader is.

        Raises:
            OSError: the reader is gone, the disk is full, or the descriptor is closed.
        """
        while data:
            try:
                data = data[os.write(self._descriptor, data) :]
            except BlockingIOError:  # Another process that shares the file has made the file non-blocking.
                select.select([], [self._descriptor], [])


def take_standard_streams() -> NeverBlockingText:
    """Replaces this process's standard output and error by `NeverBlockingText`. Returns the new standard error."""
    if not isinstance(sys.stderr, NeverBlockingText):
        before = sys.stdout, sys.stderr
        sys.stdout, sys.stderr = NeverBlockingText(1), NeverBlockingText(2)
        atexit.register(_give_back, before)
    return sys.stderr


@contextlib.contextmanager
def standard_error_taken() -> Iterator[None]:
    """Replaces standard error by a `NeverBlockingText` while a program supervises servers."""
    before = sys.stdout, sys.stderr
    sys.stderr = NeverBlockingText(2)
    try:
        yield
    finally:
        _give_back(before)


def write_out() -> bool:
    """Waits briefly until queued text is written or dropped, before the process ends. Returns False if text is left."""
    return all(stream.wait_empty(LAST_S) for stream in _taken())


def dropped_line_count() -> int:
    """Returns the number of lines that this process has dropped."""
    return sum(stream.dropped_line_count for stream in _taken())


def _taken() -> list[NeverBlockingText]:
    return [stream for stream in (sys.stderr, sys.stdout) if isinstance(stream, NeverBlockingText)]


def _give_back(before: tuple[Any, Any]) -> None:
    """Restores the original streams: text written at interpreter exit has no thread left to write it."""
    if write_out():
        sys.stdout, sys.stderr = before
