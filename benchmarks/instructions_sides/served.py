"""The gateway under callgrind. SIGUSR1 starts a count and SIGUSR2 writes it; each is answered with a byte.

The gateway polls its workers once an hour, not each second: on a busy machine, a request's count would include more
polls.
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
    """Lets signals start and stop the counter of counter.c. Each process writes a byte to the file descriptor
    `answers`.
    """
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
