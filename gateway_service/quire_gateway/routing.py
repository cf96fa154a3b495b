"""Which worker gets a request. Pure: what is known of each worker comes in as numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

SLACK: Final = 2  # requests by which a worker may be busier than the least busy one, for the sake of a cached prefix
SLACK_SHARE: Final = 0.25  # or this share of them


class Standing(NamedTuple):
    """One worker, as far as a request is concerned."""

    load: int  # requests that it computes or has waiting
    matched_token_count: int  # tokens of the prompt that its pool has


def best(standings: Sequence[Standing]) -> int:
    """Returns the index of the worker to ask; the first one of equals.

    Among workers that are about as busy as the least busy one, the one that has most of the prompt; a prefix saves a
    prefill, and a queue costs everybody's.

    Args:
        standings: of at least one worker.
    """
    least = min(standing.load for standing in standings)
    busiest = least + max(SLACK, int(least * SLACK_SHARE))
    eligible = [index for index, standing in enumerate(standings) if standing.load <= busiest]
    return max(eligible, key=lambda index: (standings[index].matched_token_count, -standings[index].load))
