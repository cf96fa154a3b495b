"""The reasons why samples wait. `Applicants.consider`, which decides about admission, finds them."""

from __future__ import annotations

from typing import NamedTuple

from quire.views import WaitReason

from quire_worker.scheduling.request import Request


class Wait(NamedTuple):
    """Why one sample waits.

    Attributes:
        reason: the first reason that applies.
        missing_block_count: for BLOCKS, the number of blocks of each group that are not free.
        behind: for ORDER and FAIRNESS, the request that comes before it.
    """

    reason: WaitReason
    missing_block_count: int = 0
    behind: Request | None = None
