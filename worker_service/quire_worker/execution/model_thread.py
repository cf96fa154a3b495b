"""The thread that the model runs on, and how it tells the event loop that a pass is done.

A thread that wakes another one through a socket lets go of the interpreter to do so. The event loop takes it, hands
tokens out and lays out the pass after the next one, and meanwhile the model's thread cannot begin the pass that lies
ready. So it rings with the interpreter held: the event loop has it as soon as the kernels run. Only where somebody
waits for a first token the event loop goes first.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from quire_worker.execution.parts import Computed

# The C library's, called with the interpreter held: the pipe that it writes to does not block.
_write = ctypes.PyDLL(None).write
_write.argtypes, _write.restype = (ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t), ctypes.c_ssize_t


class ModelThread:
    """Computes passes in order. For the event loop's thread.

    1. made
    2. submit    the first one has the event loop watch one end of a pipe
    3. close     waits for what is under way; nobody is told of anything any more

    Args:
        executor: with one thread, which others may share; `close` shuts it down.
    """

    def __init__(self, executor: ThreadPoolExecutor | None = None) -> None:
        self._executor = executor or ThreadPoolExecutor(1, thread_name_prefix="model")
        self._done = deque[tuple[asyncio.Future[Computed], Computed | BaseException, Callable[[], Computed]]]()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._read_end = self._write_end = -1

    def submit(self, compute: Callable[[], Computed]) -> asyncio.Future[Computed]:
        """Has a pass computed after those before; the future has what it gives, or why it failed."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._read_end, self._write_end = os.pipe()
            os.set_blocking(self._read_end, False)
            os.set_blocking(self._write_end, False)
            self._loop.add_reader(self._read_end, self._hear)
        future = self._loop.create_future()
        self._executor.submit(self._run, compute, future)
        return future

    def close(self) -> None:
        """Waits for the thread, and closes the pipe."""
        self._executor.shutdown()
        if self._loop is None:
            return
        if not self._loop.is_closed():
            self._loop.remove_reader(self._read_end)
        os.close(self._read_end)
        os.close(self._write_end)
        self._loop = None

    def _run(self, compute: Callable[[], Computed], future: asyncio.Future[Computed]) -> None:
        """Computes, unless nobody waits any more, and rings. On the model's thread."""
        if future.cancelled():
            return
        goes_first = True
        try:
            result: Computed | BaseException = compute()
        except BaseException as error:
            result = error
        else:
            goes_first = result.has_first_tokens
        self._done.append((future, result, compute))
        if goes_first:
            with contextlib.suppress(BlockingIOError):  # full: it has been rung
                os.write(self._write_end, b"\0")
        else:
            _write(self._write_end, b"\0", 1)

    def _hear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._read_end, 4096)
        while self._done:
            future, result, _ = self._done.popleft()
            if future.done():  # cancelled
                continue
            if isinstance(result, BaseException):
                future.set_exception(result)
            else:
                future.set_result(result)
