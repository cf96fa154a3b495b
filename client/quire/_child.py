"""Runs a server as a child that cannot outlive its parent: `python -m quire._child MODULE ARGUMENTS...`.

Standard input is the lifeline: a pipe whose other end only the parent holds. When the parent ends for any reason, the
kernel closes that end and the child terminates itself. The kernel's parent-death signal would also fire when only the
thread that started the child ends, and needs code between fork and exec.

The server then drains as after SIGTERM, because clients may be reading its answers. If the drain takes twice its limit,
the child kills itself.
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

DRAIN_S = 30.0  # drain time of a server whose command line has no --drain-timeout
LAST_S = 2.0  # time for the server to end after the drain


def kill_s(arguments: Sequence[str]) -> float:
    """Returns the seconds between SIGTERM and SIGKILL for a server with this command line."""
    drain_s = DRAIN_S
    for option, value in pairwise(arguments):
        if option == "--drain-timeout":
            with contextlib.suppress(ValueError):  # The server itself reports an invalid value.
                drain_s = float(value)
    return 2 * (drain_s + LAST_S)


def _follow_parent() -> None:
    """Waits for the end of the pipe, then sends this process SIGTERM, and later SIGKILL."""
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
