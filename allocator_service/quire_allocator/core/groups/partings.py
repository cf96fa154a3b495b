"""Where new prompts part from those before them: at their end, as a chat that goes on, or earlier.

A pool of windows keeps little behind for prompts that part early: a hit can only end before blocks of a window, and one
end for each turn is enough where all prompts go on from there. Where they are edited, cut off or written anew from the
middle, more ends are worth their blocks. Which of both is the case, a pool learns from its prompts, by what full
attention has of them or, where there is none, by the latest prompts (`history.py`):

    late     nothing follows where the prompt parts
    early    one text follows, by an edge at least
    neither  several texts follow, or did: paths part there, whoever comes (`Boundary.is_parting`)

Sources: a prompt whose last message was edited hits nothing in vLLM with sparse retention (issue 57610); Marconi (MLSys
2025) tunes what it keeps by replaying the last requests, this counts them.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from quire_allocator.core.groups.runs import Run, RunHit
from quire_allocator.core.spec import DIGEST_BYTES

LATE_BELIEVED: Final = 4.0  # prompts that are taken to have parted late before any was seen
REMEMBERED: Final = 64.0  # prompts, beyond which all before them count half
EARLY_SHARE: Final = 0.4
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
        late, early: prompts that parted so, the older ones counted less.
    """

    __slots__ = ("early", "edge_tokens", "late")

    def __init__(self, edge_tokens: int) -> None:
        self.edge_tokens = edge_tokens
        self.late = LATE_BELIEVED
        self.early = 0.0

    @property
    def are_early(self) -> bool:
        """Tells whether so many prompts part early that ends for them are worth their blocks."""
        return self.early >= EARLY_SHARE * (self.early + self.late)

    def note(self, behind: Behind, *, is_parting: bool) -> None:
        """A new prompt parts at an edge, where that is behind it; `is_parting` tells whether paths are known to part
        there."""
        if behind.way_count > 1 or is_parting:
            return
        if behind.goes_on:
            self.early += 1
        else:
            self.late += 1
        if self.early + self.late > REMEMBERED:
            self.early /= 2
            self.late /= 2

    def steps_before(self, end: int) -> list[int]:
        """Returns token counts before the end of a prompt, two edges, four and so on: whoever parts between two of them
        computes at most as much again as the prompt has behind its parting."""
        distances = [self.edge_tokens << (step + 1) for step in range(STEP_COUNT)]
        return [end - distance for distance in distances if distance < end]


def behind_hit(hit: RunHit, positions: int) -> Behind:
    """Returns what full attention has behind a hit; an edge is so many positions."""
    run = hit.runs[-1]
    left = run.size // DIGEST_BYTES - hit.cut if hit.cut else 0
    return Behind(1 if hit.cut else len(run.children), _goes_on(run, left, positions))


def _goes_on(run: Run, left: int, positions: int) -> bool:
    """Tells whether at least so many positions follow on some path, of which the run itself has `left`."""
    if left >= positions:
        return True
    return any(_goes_on(child, child.size // DIGEST_BYTES, positions - left) for child in run.children.values())
