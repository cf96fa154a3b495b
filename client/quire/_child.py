"""Runs a server as a child that cannot outlive its parent: `python -m quire._child MODULE ARGUMENTS...`.

Standard input is the lifeline: a pipe whose other end only the parent holds. When the parent ends, however it ends, the
kernel closes that end and the child terminates itself. Unlike the kernel's parent-death signal this does not mistake
the end of the thread that started the child for the end of the parent, and needs no code between fork and exec.

A server drains then as if it had been told to stop: others may be reading its answers. It is killed where that takes
twice as long as it should.
"""

from __future__ import annotations

import contextlib
import os
import runpy
import signal
import sys
import threading
from collections.abc import Sequence
from itertools import pairwise

DRAIN_S = 30.0  # used if the command line has no --drain-timeout
LAST_S = 2.0  # time to end after the drain


def kill_s(arguments: Sequence[str]) -> float:
    """Seconds between SIGTERM and SIGKILL, for a server with that command line."""
    drain_s = DRAIN_S
    for option, value in pairwise(arguments):
        if option == "--drain-timeout":
            with contextlib.suppress(ValueError):  # The server itself reports an invalid value.
                drain_s = float(value)
    return 2 * (drain_s + LAST_S)


def _follow_parent() -> None:
    """Waits for the end of the pipe, then asks this process to stop, and after a while makes it."""
    while os.read(0, 1024):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    threading.Event().wait(kill_s(sys.argv))
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    """Runs the module that the first argument names as `python -m` would."""
    threading.Thread(target=_follow_parent, name="lifeline", daemon=True).start()
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
