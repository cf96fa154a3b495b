"""Where a later prompt may part from one that was computed: up to there all groups must serve it, or none is of use.

Full attention serves a prefix wherever a block of it ends; a windowed group only where the blocks of the window before
are still there, a state only after a checkpoint. So of both those blocks are kept that stand before a *stop*, and
what no stop needs leaves the cache first (`groups/retention.py` has the rules).

Lifecycle of a stop:

    1. made        a commit, a hit, a fork or the end of a sequence has reached it, and every group can serve it
    2. continued   a deeper one was made behind it: only prompts that were edited still end here. Where two ways go on,
                   paths *part*, and it stays as valuable as it was
    3. gone        a block that it needs was evicted, or it is too far behind the end of its path
"""

from __future__ import annotations

from collections.abc import Sequence

from quire_allocator.core.eviction.queue import Entry

StopKey = tuple[int, bytes]  # tokens before it, the digest of all of them


class Stop:
    """One place at which hits can end.

    Attributes:
        key: what it is filed under, in the `index` of its namespace.
        needed: published positions of windows and checkpoints that a hit which ends here takes; all are there.
        runs: of each tree of full attention the run that it stands in: at its end, or inside.
        parent: the stop before it on its path, when it was made; it may have gone since.
        way_count: stops that were made right behind it and are not gone.
        is_parting: two stops were right behind it at once, or another path branches off there.
        answer_token_count: how far it is behind the end of the prompt whose answer made it; 0 where none did.
        is_early: it is the early end of a prompt, from which another one may part before the next stop.
        is_aside: it is continued, and what it needs leaves before what the policy ranks.
        is_gone: it has ended; only sequences and stops that came by still refer to it.
    """

    __slots__ = (
        "answer_token_count",
        "index",
        "is_aside",
        "is_early",
        "is_gone",
        "is_parting",
        "key",
        "needed",
        "parent",
        "runs",
        "way_count",
    )

    def __init__(
        self,
        index: dict[StopKey, Stop],
        key: StopKey,
        needed: Sequence[Entry],
        runs: Sequence[Entry],
        *,
        parent: Stop | None,
    ) -> None:
        self.index = index
        self.key = key
        self.needed = list(needed)
        self.runs = list(runs)
        self.parent = parent
        self.way_count = 0
        self.is_parting = False
        self.is_aside = False
        self.answer_token_count = 0
        self.is_early = False
        self.is_gone = False

    @property
    def token_count(self) -> int:
        """Counts how many tokens come before it."""
        return self.key[0]

    @property
    def is_continued(self) -> bool:
        """Tells whether only edited prompts still end here."""
        return self.way_count > 0 and not self.is_parting


def living(stop: Stop | None) -> Stop | None:
    """Returns the stop itself or, where it is gone, the next one before it that is not."""
    while stop is not None and stop.is_gone:
        stop = stop.parent
    return stop
