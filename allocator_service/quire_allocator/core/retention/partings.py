"""Counts where new prompts diverge from earlier ones: at their end, as a chat that continues, or before it.

A pool of windows keeps little for prompts that diverge early: a hit needs the blocks of a window before its end. One
stop for each turn is enough if all prompts continue from there. If prompts are edited, cut off or rewritten from the
middle, more stops are worth their blocks. A pool learns this from the prefixes of its prompts in full attention.
Without full attention it learns nothing, and assumes that all prompts diverge late:

    late     no known text follows where the prompt diverges
    again    one text follows, at least an edge long, and all of the prompt is known: its answer is requested again
    inside   one text follows, and the prompt diverges from it
    (none)   several texts follow, or did: prompts are known to diverge there (`Stop.is_parting`), which is not counted

Sources: a prompt whose last message was edited hits nothing in vLLM with sparse retention (issue 57610); Marconi (MLSys
2025) tunes its retention by replaying the last requests; this module counts them.
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

LATE_BELIEVED: Final = 4.0  # number of late prompts that are assumed before any prompt was counted
LATE_BELIEVED_OF_STATES: Final = 32.0
REMEMBERED: Final = 256.0  # number of prompts after which all earlier prompts count half
EARLY_SHARE: Final = 0.4  # If at least this share of prompts diverges early, more stops are worth their window blocks.
EARLY_SHARE_OF_STATES: Final = 0.7  # the same share in a pool with states, which take a page each
STEP_COUNT: Final = 7


class Behind(NamedTuple):
    """The known texts that continue a prefix of a prompt.

    Attributes:
        way_count: how many different blocks follow.
        has_more: whether one of the texts continues for at least an edge.
    """

    way_count: int
    has_more: bool


class Partings:
    """Counts where the prompts of one pool diverge.

    Attributes:
        edge_tokens: hits end at multiples of this number.
        stop_tokens: steps are at multiples of this number. With states, checkpoints are made at multiples of it anyway.
        late, again, inside: prompts that diverged in this way; older prompts count less.
        late_seen: the part of `late` that was counted, without the assumed prompts.
    """

    __slots__ = ("_share", "again", "edge_tokens", "inside", "late", "late_seen", "stop_tokens")

    def __init__(self, edge_tokens: int, checkpoint_tokens: int = 0) -> None:
        """Starts with assumed late prompts. `checkpoint_tokens` is the distance of checkpoints; 0 without states."""
        self.edge_tokens = edge_tokens
        self.stop_tokens = math.lcm(edge_tokens, checkpoint_tokens or 1)
        self._share = EARLY_SHARE_OF_STATES if checkpoint_tokens else EARLY_SHARE
        self.late = LATE_BELIEVED_OF_STATES if checkpoint_tokens else LATE_BELIEVED
        self.again = self.inside = self.late_seen = 0.0

    @property
    def are_early(self) -> bool:
        """Tells whether enough prompts diverge before a stop to make continued stops worth their blocks."""
        return self.again + self.inside >= self._share * (self.late + self.again + self.inside)

    @property
    def are_inside(self) -> bool:
        """Tells whether enough prompts diverge inside earlier prompts, where no stop is, to make steps worthwhile."""
        return self.inside >= self._share * (self.late + self.again + self.inside)

    @property
    def are_late(self) -> bool:
        """Tells whether prompts diverge late at least as often as earlier: stops of answers are then worth states."""
        return self.late_seen + LATE_BELIEVED >= self.again + self.inside

    def note(self, behind: Behind, *, is_parting: bool, is_whole: bool) -> None:
        """Counts a new prompt that diverges at an edge.

        Args:
            behind: the known continuations there.
            is_parting: whether paths are known to diverge there.
            is_whole: whether this is the prompt's last edge that leaves a token to compute.
        """
        if behind.way_count > 1 or is_parting:
            return
        if not behind.has_more:
            self.late += 1
            self.late_seen += 1
        elif is_whole:
            self.again += 1
        else:
            self.inside += 1
        if self.late + self.again + self.inside > REMEMBERED:
            self.late /= 2
            self.late_seen /= 2
            self.again /= 2
            self.inside /= 2

    def steps_before(self, end: int) -> list[int]:
        """Returns token counts two edges, four and so on before the end of a prompt, the deepest first.

        A prompt that diverges between two counts recomputes at most as many tokens as the old prompt has after that
        point. With states, the counts are rounded down to checkpoints.
        """
        distances = [self.edge_tokens << (step + 1) for step in range(STEP_COUNT)]
        stops = {(end - distance) // self.stop_tokens * self.stop_tokens for distance in distances if distance < end}
        return sorted(stops - {0}, reverse=True)
