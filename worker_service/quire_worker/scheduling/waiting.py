"""The reasons for which samples wait; `Applicants.consider` finds them, since it decides about admission."""

from __future__ import annotations

import enum
from typing import NamedTuple

from quire_worker.scheduling.request import Request


class WaitReason(enum.IntEnum):
    """The reason that a request waits; numbers as in `quire.v1.WaitReason`."""

    NEXT_PASS = 1
    NO_SESSION = 2
    ALLOCATOR = 3
    BLOCKS = 4
    PLACES = 5
    PREFIX = 6
    PASS_FULL = 7
    ORDER = 8
    FAIRNESS = 9


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
