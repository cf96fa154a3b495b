"""The thread that the model runs on, and how it tells the event loop that a pass is done.

Both threads need the interpreter lock. The event loop needs the lock for half a millisecond a turn, to hand out tokens
and to lay out the pass after the next pass. The model's thread needs the lock between the kernels of two passes. So the
event loop should hold the lock while kernels run. Between two passes, the event loop would delay the kernels:

    model's thread   |  kernels of pass 1   | tokens of 1, begin 2 |  kernels of pass 2
    event loop         hand out 0, lay out 2                         hand out 1, lay out 3

So the end of a pass is reported when the kernels of the next pass begin (`before_kernels`). The model's thread keeps
the lock while it writes to the pipe. If the model's thread released the lock, even for a system call or to destroy a
tensor, it would wait until the event loop has finished its turn.

Two exceptions make first tokens fast. When a pass is submitted to an idle thread, the event loop lets its kernels begin
before it plans the next pass (`begun`). After a pass that brought only first tokens, the model's thread waits until the
event loop has sent them (`go_on`).

Another thread, the reader, finishes the passes that were only launched on a GPU (`launched.py`). The reader takes these
passes in order, and reports each pass to the event loop at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import threading
from collections import deque
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

from quire_worker.execution.lane import Lane
from quire_worker.execution.parts import Computed
from quire_worker.execution.prepared import Later, PlainTokens, Prepared
from quire_worker.scheduling.plan import Work

# A function that computes a batch. If one call runs most of the kernels, the function calls its second argument right
# before that call.
Result: TypeAlias = Computed | PlainTokens
Compute: TypeAlias = Callable[[Prepared, Callable[[], None]], Result | Later]

GIVES_WAY_S = 0.001  # longest wait for `go_on`; the event loop needs a third of this time to send first tokens

# The C library's `write`. PyDLL holds the interpreter lock during the call, which is short: the pipe is non-blocking.
_write = ctypes.PyDLL(None).write
_write.argtypes, _write.restype = (ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t), ctypes.c_ssize_t


class Pass(NamedTuple):
    """A batch that was submitted to the model's thread."""

    work: list[Work]
    result: asyncio.Future[Result]


class Done(NamedTuple):
    """A pass that was computed. The result holds the inputs, so that the event loop destroys their tensors: see the
    module.
    """

    future: asyncio.Future[Result]
    result: Result | BaseException
    prepared: Prepared


class ModelThread:
    """Computes passes in order. Call the methods only on the event loop's thread.

    1. created
    2. submit    the first call makes the event loop watch one end of a pipe
    3. close     waits for the passes under way; their results are no longer delivered

    Args:
        lane: a lane that other engines may share; `close` closes it. If None, the object starts its own lane.
    """

    def __init__(self, lane: Lane | None = None) -> None:
        self._lane = lane or Lane("model")
        self._reader: Lane | None = None  # the thread that finishes launched passes; the first such pass starts it
        self._submitted_count = self._begun_count = 0
        self._done = deque[Done]()
        # Only the model's thread uses these two flags.
        self._is_owed = False  # the event loop must be notified, and has not been yet
        self._has_kernels = False  # the pass under way has called `before_kernels`
        self._announces_kernels = False  # the last pass called `before_kernels`, so the next pass will, too
        # Set when a pass calls `before_kernels` or ends, if the thread was idle at its submission.
        self._begun: asyncio.Future[None] | None = None
        self._may_go_on = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._read_end = self._write_end = -1

    def submit(self, compute: Compute, prepared: Prepared) -> asyncio.Future[Result]:
        """Queues a pass behind the earlier passes. The future gets its result or its exception."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._read_end, self._write_end = os.pipe()
            os.set_blocking(self._read_end, False)
            os.set_blocking(self._write_end, False)
            self._loop.add_reader(self._read_end, self._hear)
        future: asyncio.Future[Result] = self._loop.create_future()
        self._submitted_count += 1
        if self._announces_kernels and not prepared.is_behind:
            self._begun = self._loop.create_future()
        self._lane.submit(self._run, compute, prepared, future)
        return future

    async def begun(self) -> None:
        """Waits until the kernels of the submitted pass run, if the thread was idle at its submission.

        If the previous pass did not call `before_kernels`, this method only yields to the event loop once.
        """
        if self._begun is None:
            await asyncio.sleep(0)
        else:
            await self._begun

    def go_on(self) -> None:
        """Lets the model's thread continue, because the first tokens have been sent."""
        self._may_go_on.set()

    def close(self) -> None:
        """Waits for the thread, and closes the pipe."""
        self._lane.close()
        if self._reader is not None:
            self._reader.close()
        if self._loop is None:
            return
        if not self._loop.is_closed():
            self._loop.remove_reader(self._read_end)
        os.close(self._read_end)
        os.close(self._write_end)
        self._loop = None

    # -- on the model's thread -----------------------------------------------------------------------------------------

    def _run(self, compute: Compute, prepared: Prepared, future: asyncio.Future[Result]) -> None:
        self._begun_count += 1
        self._has_kernels = False
        self._is_owed |= not prepared.is_behind  # the event loop may be waiting in `begun` for a notice
        if future.cancelled():
            self._tell()
            return
        result: Result | Later | BaseException
        try:
            result, goes_first = compute(prepared, self._before_kernels), prepared.has_first_tokens
            gives_way = prepared.has_first_tokens_alone
        except BaseException as error:
            result, goes_first, gives_way = error, True, False
        self._announces_kernels = self._has_kernels
        if isinstance(result, Later):
            self._reader = self._reader or Lane("reader")
            self._reader.submit(self._finish, result, prepared, future)
            return
        self._done.append(Done(future, result, prepared))
        self._is_owed = True
        if goes_first:
            self._is_owed = False
            self._may_go_on.clear()
            with contextlib.suppress(BlockingIOError):  # a full pipe wakes the event loop anyway
                os.write(self._write_end, b"\0")
            if gives_way:
                self._may_go_on.wait(GIVES_WAY_S)
        elif not self._has_kernels or self._submitted_count == self._begun_count:
            self._tell()

    def _finish(self, later: Later, prepared: Prepared, future: asyncio.Future[Result]) -> None:
        """Waits for a launched pass and hands over its result. Runs on the reader's thread."""
        result: Result | BaseException
        try:
            result = later.finish()
        except BaseException as error:
            result = error
        self._done.append(Done(future, result, prepared))
        with contextlib.suppress(BlockingIOError):  # a full pipe wakes the event loop anyway
            os.write(self._write_end, b"\0")

    def _before_kernels(self) -> None:
        self._has_kernels = True
        self._tell()

    def _tell(self) -> None:
        if self._is_owed:
            self._is_owed = False
            _write(self._write_end, b"\0", 1)

    # -- on the event loop ---------------------------------------------------------------------------------------------

    def _hear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._read_end, 4096)
        begun, self._begun = self._begun, None
        if begun is not None and not begun.done():
            begun.set_result(None)
        while self._done:
            future, result, _ = self._done.popleft()
            if future.done():  # cancelled
                continue
            if isinstance(result, BaseException):
                future.set_exception(result)
            else:
                future.set_result(result)
