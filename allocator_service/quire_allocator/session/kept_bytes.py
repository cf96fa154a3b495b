"""Bounds the memory of steps and replies that sessions keep for replay.

Each session keeps a window of steps, and each step may have megabytes: an owner of many sessions could take gigabytes.
Only large steps are counted, because honest ones are small.

Pure: no clock, no wire.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from typing import Final

from quire._serving.caller_shares import CallerShares

from quire_allocator import limits
from quire_allocator.core.ownership.directory import Directory, Ownership

SMALL_BYTES: Final = 8 << 10  # A step is not counted if it and its reply together have at most so many bytes.


class _Kept:
    """The counted steps of one session: number and bytes of each step with its reply, in order."""

    __slots__ = ("caller", "steps")

    def __init__(self, caller: Hashable) -> None:
        self.caller = caller
        self.steps: deque[tuple[int, int]] = deque()


class KeptBytes:
    """Counts the bytes of large steps and their replies, per caller.

    Args:
        directory: the sessions; the bytes of ended sessions no longer count.
    """

    def __init__(self, directory: Directory) -> None:
        self._directory = directory
        self.shares = CallerShares(limits.KEPT_BYTES_MAX)
        self._of = dict[bytes, _Kept]()  # counted steps by session id

    def count(self, owner: Ownership, number: int, size: int) -> None:
        """Counts the step that its session has just recorded. If its caller keeps too many bytes, the session forgets
        this reply and all earlier replies. If one of these steps is repeated, it gets STEP_GAP, and the owner reports.

        Args:
            owner: the owner of the session.
            number: the step's number.
            size: bytes of the step and its reply.
        """
        if self._of and owner.session_id in self._of:
            self._leave(owner.session_id, owner.steps.first_kept)
        if size <= SMALL_BYTES:
            return
        caller = owner.caller
        if not self.shares.take(caller, size):
            self._forget_sessions_that_ended()
            if not self.shares.take(caller, size):
                owner.steps.forget(number)
                self._leave(owner.session_id, number + 1)
                return
        kept = self._of.get(owner.session_id)
        if kept is None:
            kept = self._of[owner.session_id] = _Kept(caller)
        kept.steps.append((number, size))

    def _leave(self, session_id: bytes, first_kept: int) -> None:
        kept = self._of.get(session_id)
        if kept is None:
            return
        while kept.steps and kept.steps[0][0] < first_kept:
            self.shares.leave(kept.caller, kept.steps.popleft()[1])
        if not kept.steps:
            del self._of[session_id]

    def _forget_sessions_that_ended(self) -> None:
        for session_id in list(self._of):
            if self._directory.find_session(session_id) is None:
                self._leave(session_id, limits.LAST_STEP_MAX << 1)
