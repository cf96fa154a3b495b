"""The ranks that a worker starts on its own machine and watches.

Each rank is a process that ends with the worker, even if the worker is killed (`quire._child`). If a rank ends first,
`lost` holds its number and how it ended.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import replace
from pathlib import Path

from quire_worker.ranks.identity import RENDEZVOUS, RankIdentity

GRACE_S = 5.0  # seconds that a rank has to stop before it is killed
NOTICE_S = 0.5  # seconds to wait for the exit code of a rank that does not answer


class Ranks:
    """The processes of the other ranks, seen from rank 0.

    Attributes:
        identity: this process's rank.
        lost: done once a rank is gone; its result is the reason.
    """

    def __init__(self, identity: RankIdentity) -> None:
        """Creates the object without any process."""
        self.identity = identity
        self.lost: Future[str] = Future()
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._is_ending = False

    def lose(self, reason: str) -> None:
        """Reports that a rank does not answer. May be called from any thread, and more than once.

        This method first waits a moment, because the end of a process is a better reason to report than silence.
        """
        if self._processes:
            with contextlib.suppress(TimeoutError):
                self.lost.result(NOTICE_S)
        self._lose(reason)

    def let_end(self) -> None:
        """Allows ranks to end from now on, without `lost` being set."""
        self._is_ending = True

    def start(self, file: Path, arguments: Sequence[str]) -> None:
        """Starts all ranks but 0. The ranks meet this process over a file.

        Args:
            file: a path in a folder that only this user may read.
            arguments: the worker's command line.
        """
        self.identity = replace(self.identity, file=file)
        for rank in range(1, self.identity.size):
            own = {"RANK": str(rank), "WORLD_SIZE": str(self.identity.size), RENDEZVOUS: str(file)}
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "quire._child", "quire_worker", *arguments],  # -P: see quire.local
                stdin=subprocess.PIPE,  # the lifeline: nothing is ever written to it
                env={**os.environ, "OMP_WAIT_POLICY": "PASSIVE", **own},
                start_new_session=True,  # Ctrl-C in a terminal reaches only rank 0, which stops the other ranks
            )
            self._processes[rank] = process
            threading.Thread(target=self._watch, args=(rank, process), name=f"rank {rank}", daemon=True).start()

    def end(self, *, grace_s: float) -> None:
        """Waits for every rank to end, and kills the ranks that do not end in time."""
        self.let_end()
        for process in self._processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(grace_s)
            process.kill()
            process.wait()

    def _watch(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        code = process.wait()
        if not self._is_ending:
            self._lose(
                f"rank {rank} was ended by signal {-code}" if code < 0 else f"rank {rank} ended with code {code}"
            )

    def _lose(self, reason: str) -> None:
        with contextlib.suppress(InvalidStateError):  # only the first reason is kept
            self.lost.set_result(reason)


@contextlib.contextmanager
def starting(identity: RankIdentity, arguments: Sequence[str]) -> Iterator[Ranks]:
    """Starts the other ranks, unless torchrun did, and ends them when the context ends.

    Args:
        identity: rank 0's identity.
        arguments: the worker's command line.
    """
    ranks = Ranks(identity)
    if identity.size == 1 or identity.is_by_torchrun:
        yield ranks
        return
    with tempfile.TemporaryDirectory(prefix="quire-ranks-") as folder:  # the folder's mode is 0700
        try:
            ranks.start(Path(folder) / "rendezvous", arguments)
            yield ranks
        except BaseException:
            ranks.end(grace_s=0.0)
            raise
        ranks.end(grace_s=GRACE_S)
