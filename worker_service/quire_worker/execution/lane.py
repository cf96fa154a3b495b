"""One thread that runs the items of a queue in order.

An executor of `concurrent.futures` would create a future, a condition and a semaphore for each item. Creating these
costs time between two passes. The results of a pass reach the event loop through a pipe (`model_thread.py`).
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, TypeAlias

_Items: TypeAlias = SimpleQueue[tuple[Callable[..., None], tuple[Any, ...]] | None]


class Lane:
    """A thread that its callers share.

    1. created   the thread waits for items
    2. submit    may be called from any thread
    3. close     waits for the submitted items; at exit the interpreter closes a lane that is still open
    """

    def __init__(self, name: str) -> None:
        """Starts a thread of that name."""
        self._items: _Items = SimpleQueue()
        thread = threading.Thread(target=_work, args=(self._items,), name=name, daemon=True)
        self._end = weakref.finalize(self, _end, self._items, thread)
        thread.start()

    def submit(self, run: Callable[..., None], *arguments: Any) -> None:
        """Queues a call of `run`, after all earlier items. `run` must not raise.

        Raises:
            RuntimeError: the lane is closed.
        """
        if not self._end.alive:
            raise RuntimeError("this thread was closed and takes no more calls")
        self._items.put((run, arguments))

    def close(self) -> None:
        """Waits until all items have run, and ends the thread. A second call does nothing."""
        self._end()


def _work(items: _Items) -> None:
    while True:
        item = items.get()
        if item is None:
            return
        run, arguments = item
        run(*arguments)
        del item, run, arguments  # otherwise the waiting thread would keep their tensors alive


def _end(items: _Items, thread: threading.Thread) -> None:
    items.put(None)
    thread.join()
