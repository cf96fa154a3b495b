"""One thread that computes what it is given, in order: a queue and nothing else.

`concurrent.futures` does the same, and each item passes a future, a condition and a semaphore there, on the thread
between two passes. What a pass gives goes to the event loop by another way (`model_thread.py`).
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, TypeAlias

_Items: TypeAlias = SimpleQueue[tuple[Callable[..., None], tuple[Any, ...]] | None]


class Lane:
    """A thread of its own for whoever shares it.

    1. made      the thread waits
    2. submit    from any thread
    3. close     waits for what was submitted; so does the interpreter, before it ends, for a lane that was not closed
    """

    def __init__(self, name: str) -> None:
        """Starts the thread, under that name."""
        self._items: _Items = SimpleQueue()
        thread = threading.Thread(target=_work, args=(self._items,), name=name, daemon=True)
        self._end = weakref.finalize(self, _end, self._items, thread)
        thread.start()

    def submit(self, run: Callable[..., None], *arguments: Any) -> None:
        """Has something run after all that was submitted before. It may not raise.

        Raises:
            RuntimeError: the lane is closed.
        """
        if not self._end.alive:
            raise RuntimeError("the lane is closed")
        self._items.put((run, arguments))

    def close(self) -> None:
        """Waits until all is run, and ends the thread. Again, it does nothing."""
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
