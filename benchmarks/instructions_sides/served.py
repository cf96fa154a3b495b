"""The gateway under callgrind: SIGUSR1 starts a count, SIGUSR2 writes it; each answers a byte.

It asks its worker once, and not again each second: on a busy machine a request would count more of that.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import signal
import sys
from types import FrameType

from quire_gateway import fleet
from quire_gateway.server import main


def count_on_signals(library: str, answers: int) -> None:
    """Has signals start and stop the counter of counter.c; a byte in `answers`, a file descriptor, says that it did."""
    counter, numbers = ctypes.CDLL(library), itertools.count()

    def start(_signal: int, _frame: FrameType | None) -> None:
        os.write(answers, b"+")
        counter.start()

    def stop(_signal: int, _frame: FrameType | None) -> None:
        counter.stop(str(next(numbers)).encode())
        os.write(answers, b"-")

    signal.signal(signal.SIGUSR1, start)
    signal.signal(signal.SIGUSR2, stop)


if __name__ == "__main__":
    fleet.POLL_S = 3_600.0  # type: ignore[misc]
    count_on_signals(sys.argv[1], int(sys.argv[2]))
    main(sys.argv[3:])
