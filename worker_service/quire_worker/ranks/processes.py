"""The ranks that a worker starts on its own machine, and watches.

Each is a process of its own that ends with this one, however this one ends (`quire._child`). If one of them ends first,
`lost` says which, and how.
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

GRACE_S = 5.0  # for a rank that was told to stop
NOTICE_S = 0.5  # within which a process that the others miss is seen to have ended


class Ranks:
    """The crew as rank 0 sees it.

    Attributes:
        identity: of this process.
        lost: done once a rank is gone; says which, and how.
    """

    def __init__(self, identity: RankIdentity) -> None:
        """Knows of no process yet."""
        self.identity = identity
        self.lost: Future[str] = Future()
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._is_ending = False

    def lose(self, reason: str) -> None:
        """Says that a rank does not answer; callable from any thread, and more than once. If a process has ended,
        which is found out in a moment, that is a better reason."""
        if self._processes:
            with contextlib.suppress(TimeoutError):
                self.lost.result(NOTICE_S)
        self._lose(reason)

    def let_end(self) -> None:
        """From now on a rank may end."""
        self._is_ending = True

    def start(self, file: Path, arguments: Sequence[str]) -> None:
        """Starts ranks 1 and further, which meet this one over a file.

        Args:
            file: in a folder that only this user may read.
            arguments: the worker's command line.
        """
        self.identity = replace(self.identity, file=file)
        for rank in range(1, self.identity.size):
            own = {"RANK": str(rank), "WORLD_SIZE": str(self.identity.size), RENDEZVOUS: str(file)}
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "quire._child", "quire_worker", *arguments],  # -P as in quire.local
                stdin=subprocess.PIPE,  # the lifeline; nothing is ever written
                env={**os.environ, "OMP_WAIT_POLICY": "PASSIVE", **own},
                start_new_session=True,  # Ctrl-C on a terminal reaches rank 0 alone, which stops the others in order
            )
            self._processes[rank] = process
            threading.Thread(target=self._watch, args=(rank, process), name=f"rank {rank}", daemon=True).start()

    def end(self, *, grace_s: float) -> None:
        """Waits until every rank has ended, and ends those that do not."""
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
        with contextlib.suppress(InvalidStateError):  # it is known already
            self.lost.set_result(reason)


@contextlib.contextmanager
def starting(identity: RankIdentity, arguments: Sequence[str]) -> Iterator[Ranks]:
    """Starts what other ranks there have to be, and leaves none behind.

    Args:
        identity: of rank 0.
        arguments: the worker's command line.
    """
    ranks = Ranks(identity)
    if identity.size == 1 or identity.is_by_torchrun:
        yield ranks
        return
    with tempfile.TemporaryDirectory(prefix="quire-ranks-") as folder:  # of mode 0700
        try:
            ranks.start(Path(folder) / "rendezvous", arguments)
            yield ranks
        except BaseException:
            ranks.end(grace_s=0.0)
            raise
        ranks.end(grace_s=GRACE_S)
