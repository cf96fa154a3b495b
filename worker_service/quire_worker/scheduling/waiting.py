"""The reasons for which samples wait; `Applicants.consider` finds them, since it decides about admission."""

from __future__ import annotations

from typing import NamedTuple

from quire.views import WaitReason

from quire_worker.scheduling.request import Request


class Wait(NamedTuple):
    """Why one sample waits.

    Attributes:
        reason: the first that holds.
        missing_block_count: blocks of each group that are not free, with BLOCKS.
        behind: the request before it, with ORDER and FAIRNESS.
    """

    reason: WaitReason
    missing_block_count: int = 0
    behind: Request | None = None
