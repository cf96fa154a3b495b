"""The ranks that a worker starts on its own machine, and watches.

Each is a process of its own that ends with this one, however this one ends (`quire._child`). If one of them ends first,
`lost` is told which, and how.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from concurrent.futures import Future, InvalidStateError
from pathlib import Path
from types import TracebackType
from typing import Self

from quire_worker.ranks.place import RENDEZVOUS, Place

GRACE_S = 5.0  # for a rank that was told to stop


class RankProcesses:
    """Ranks 1 and further of a group whose rank 0 is this process.

    Lifecycle: `with` starts them; `stop_watching` before they are told to stop; the end of `with` waits for them, and
    kills who does not end.

    Attributes:
        place: of this process.
        lost: done once a rank has ended by itself; says which, and how.
    """

    def __init__(self, size: int, arguments: Sequence[str]) -> None:
        """Nothing is started yet.

        Args:
            size: ranks of the group, this process included.
            arguments: the worker's command line.
        """
        self._folder = tempfile.TemporaryDirectory(prefix="quire-ranks-")  # of mode 0700
        self._arguments = arguments
        self._processes: list[subprocess.Popen[bytes]] = []
        self._is_watching = True
        self.place = Place(0, size, 0, Path(self._folder.name) / "rendezvous", is_on_loopback=True)
        self.lost: Future[str] = Future()

    def __enter__(self) -> Self:
        for rank in range(1, self.place.size):
            process = subprocess.Popen(
                [sys.executable, "-m", "quire._child", "quire_worker", *self._arguments],
                stdin=subprocess.PIPE,  # the lifeline; nothing is ever written
                env=self._environment(rank),
                start_new_session=True,  # Ctrl-C on a terminal reaches rank 0 alone, which stops the others in order
            )
            self._processes.append(process)
            threading.Thread(target=self._watch, args=(rank, process), name=f"rank {rank}", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._is_watching = False
        for process in self._processes:
            if kind is not None:
                process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_S)
            process.kill()
            process.wait()
        self._folder.cleanup()

    def stop_watching(self) -> None:
        """From now on a rank may end."""
        self._is_watching = False

    def _environment(self, rank: int) -> dict[str, str]:
        place = {"RANK": str(rank), "WORLD_SIZE": str(self.place.size), RENDEZVOUS: str(self.place.file)}
        return {**os.environ, "OMP_WAIT_POLICY": "PASSIVE", **place}

    def _watch(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        code = process.wait()
        if self._is_watching:
            how = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
            with contextlib.suppress(InvalidStateError):  # another one was quicker
                self.lost.set_result(f"rank {rank} {how}")
