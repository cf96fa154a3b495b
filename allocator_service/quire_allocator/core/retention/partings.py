"""Where new prompts part from those before them: at their end, as a chat that goes on, or earlier.

A pool of windows keeps little behind for prompts that part early: a hit can only end before blocks of a window, and one
end for each turn is enough where all prompts go on from there. Where they are edited, cut off or written anew from the
middle, more ends are worth their blocks. Which of both is the case, a pool learns from its prompts, by what full
attention has of them; without full attention it learns nothing, and takes all prompts to part late:

    late     nothing follows where the prompt parts
    again    one text follows by an edge at least, and all of the prompt is known: an answer is asked for once more
    inside   one text follows, and the prompt goes another way
    nothing  several texts follow, or did: paths part there, whoever comes (`Stop.is_parting`)

Sources: a prompt whose last message was edited hits nothing in vLLM with sparse retention (issue 57610); Marconi (MLSys
2025) tunes what it keeps by replaying the last requests, this counts them.
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

LATE_BELIEVED: Final = 4.0  # prompts that are taken to have parted late before any was seen
LATE_BELIEVED_OF_STATES: Final = 32.0
REMEMBERED: Final = 256.0  # prompts, beyond which all before them count half
EARLY_SHARE: Final = 0.4  # of the prompts, from which on early ends are worth the blocks of windows
EARLY_SHARE_OF_STATES: Final = 0.7  # the same of states, which take a page each
STEP_COUNT: Final = 7


class Behind(NamedTuple):
    """What is known of texts that begin with the same tokens as a prompt.

    Attributes:
        way_count: how many different blocks follow.
        goes_on: one of the texts is longer by an edge at least.
    """

    way_count: int
    goes_on: bool


class Partings:
    """Counts the partings of one pool.

    Attributes:
        edge_tokens: hits end at multiples of this.
        stop_tokens: steps do; where groups keep states, checkpoints are at multiples of it, whoever needs them.
        late, again, inside: prompts that parted so, the older ones counted less.
        late_seen: those of `late` that were seen, and not only believed.
    """

    __slots__ = ("_share", "again", "edge_tokens", "inside", "late", "late_seen", "stop_tokens")

    def __init__(self, edge_tokens: int, checkpoint_tokens: int = 0) -> None:
        """`checkpoint_tokens` is how far checkpoints of states are apart; 0 without states."""
        self.edge_tokens = edge_tokens
        self.stop_tokens = math.lcm(edge_tokens, checkpoint_tokens or 1)
        self._share = EARLY_SHARE_OF_STATES if checkpoint_tokens else EARLY_SHARE
        self.late = LATE_BELIEVED_OF_STATES if checkpoint_tokens else LATE_BELIEVED
        self.again = self.inside = self.late_seen = 0.0

    @property
    def are_early(self) -> bool:
        """Tells whether so many prompts part before an end that continued stops are worth their blocks."""
        return self.again + self.inside >= self._share * (self.late + self.again + self.inside)

    @property
    def are_inside(self) -> bool:
        """Tells whether so many do where no stop stands that steps are worth theirs."""
        return self.inside >= self._share * (self.late + self.again + self.inside)

    @property
    def go_on(self) -> bool:
        """Tells whether at least as many go on from the end as part before it, so that answers are worth states."""
        return self.late_seen + LATE_BELIEVED >= self.again + self.inside

    def note(self, behind: Behind, *, is_parting: bool, is_whole: bool) -> None:
        """A new prompt parts at an edge.

        Args:
            behind: what is known to follow there.
            is_parting: paths are known to part there.
            is_whole: it is the last edge of the prompt that leaves a token to compute.
        """
        if behind.way_count > 1 or is_parting:
            return
        if not behind.goes_on:
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
        """Returns token counts before the end of a prompt, two edges, four and so on, the deepest first: whoever parts
        between two of them computes at most as much again as the prompt has behind its parting. Of states, as far as
        there are checkpoints."""
        distances = [self.edge_tokens << (step + 1) for step in range(STEP_COUNT)]
        stops = {(end - distance) // self.stop_tokens * self.stop_tokens for distance in distances if distance < end}
        return sorted(stops - {0}, reverse=True)
