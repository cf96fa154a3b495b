"""Runs episodes of malformed messages, one per seed."""

from __future__ import annotations

import random

from quire.errors import Reason

from tests.fuzz.allocator import Episode, Seen

MESSAGES_PER_EPISODE = 500
# Reasons that the allocator's machines and handlers give. Other reasons come only from the worker, the transport and
# watches.
REASONS = frozenset(
    {
        Reason.MALFORMED,
        Reason.POOL_UNKNOWN,
        Reason.POOL_OWNED,
        Reason.FENCED,
        Reason.SESSION_UNKNOWN,
        Reason.STEP_MISMATCH,
        Reason.STEP_GAP,
        Reason.VERSION,
        Reason.LAYOUT,
        Reason.LIMIT,
        Reason.TOO_LARGE,
        Reason.REPORT_ADMISSION,
        Reason.POOL_QUARANTINED,
        Reason.IDLE,
        Reason.DRAINING,
    }
)


def run_episode(seed: int, seen: Seen, messages: int = MESSAGES_PER_EPISODE) -> None:
    """Runs one episode. The seed determines all of it.

    Raises:
        Exception: a rule was violated, or the allocator raised something else than a `Refusal`.
    """
    episode = Episode(random.Random(seed), seen)
    end = seen.count + messages
    while seen.count < end and not episode.is_worn_out:
        episode.round()
    episode.end()
