"""One thread that runs its items in order: a queue and nothing else.

An executor of `concurrent.futures` would add a future, a condition and a semaphore to each item, on the thread between
two passes. The results of a pass reach the event loop by another way (`model_thread.py`).
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

    1. made      the thread waits
    2. submit    from any thread
    3. close     waits for the submitted items. The interpreter, too, waits for those of an open lane before it ends
    """

    def __init__(self, name: str) -> None:
        """Starts the thread, under that name."""
        self._items: _Items = SimpleQueue()
        thread = threading.Thread(target=_work, args=(self._items,), name=name, daemon=True)
        self._end = weakref.finalize(self, _end, self._items, thread)
        thread.start()

    def submit(self, run: Callable[..., None], *arguments: Any) -> None:
        """Has `run` called after all earlier items. It may not raise.

        Raises:
            RuntimeError: the lane is closed.
        """
        if not self._end.alive:
            raise RuntimeError("the lane is closed")
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
        del item, run, arguments  # nothing is held while the thread waits


def _end(items: _Items, thread: threading.Thread) -> None:
    items.put(None)
    thread.join()
