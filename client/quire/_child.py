"""Runs a server as a child that cannot outlive its parent: `python -m quire._child MODULE ARGUMENTS...`.

Standard input is the lifeline: a pipe whose other end only the parent holds. When the parent ends, however it ends, the
kernel closes that end and the child terminates itself. Unlike the kernel's parent-death signal this does not mistake
the end of the thread that started the child for the end of the parent, and needs no code between fork and exec.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import threading

KILL_S = 15.0  # a server that drains takes 5 s for its calls here (quire.local) and up to 2 s more


def _follow_parent() -> None:
    """Waits for the end of the pipe, then asks this process to stop, and after a while makes it."""
    while os.read(0, 1024):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    threading.Event().wait(KILL_S)
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    """Runs the module that the first argument names as `python -m` would."""
    threading.Thread(target=_follow_parent, name="lifeline", daemon=True).start()
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
