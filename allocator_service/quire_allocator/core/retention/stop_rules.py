"""Chooses stops: the token counts of a sequence where a later prompt's hit should be able to end.

A hit ends only where every group can serve it, so windows keep the blocks before a stop, and states make a checkpoint
there. An owner that keeps states ends passes at stops. `docs/hybrid.md` has the table of all kinds.

A state takes a page, so its size decides about early stops and answers' stops. A prompt has an early stop if the
attention of its new part takes at least a quarter of the blocks of a state. An answer gets stops if the prompt's
attention takes at least as many blocks as a state. A fork has no stops of the answer; its parent loses them.

    prompt of 4,096 tokens, blocks of 16, one group of full attention and 24 of states; its end is 4,080
        all is new           255 blocks of attention, 24 of a state: early at 3,568, and at 4,112, 4,128, 4,144, ...
        4,000 are cached     5 blocks of attention are new: no early stop

Sources: decisions 19, 24, 56 and 59 in `docs/decisions`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Final

from quire_allocator.core.retention.partings import STEP_COUNT, Partings
from quire_allocator.core.retention.stop import Stop
from quire_allocator.core.spec import GroupKind, GroupSpec

_EARLY_PART: Final = 8
_STATE_PART: Final = 4
_DISTANCES: Final = tuple(sorted([1, *[2 << each for each in range(11)], *[3 << each for each in range(10)]]))
_TOKENS_MAX: Final = 2**32 - 1  # largest token count that a message carries
STOPS_MAX: Final = 3 + 4 + STEP_COUNT + 22  # end, junction and early stop; 4 breakpoints; steps; 22 `_DISTANCES`


class Turn:
    """The stops of one sequence, which computes a prompt and its answer.

    Attributes:
        token_counts: all stops, rising, each at an edge.
        prompt_end: the end of the prompt; later stops are of the answer. 0 if the prompt has no whole edge.
        early: the early stop; 0 if there is none.
        are_left: whether the sequence may still reach a stop; only then do commits check.
        last: the deepest stop of its prefix that was made or hit; that stop may have ended since.
    """

    __slots__ = ("are_left", "early", "last", "prompt_end", "token_counts")

    def __init__(self, token_counts: tuple[int, ...], prompt_end: int, early: int) -> None:
        self.token_counts = token_counts
        self.prompt_end = prompt_end
        self.early = early
        self.are_left = bool(token_counts)
        self.last: Stop | None = None

    def reached(self, committed: int, until: int) -> tuple[int, ...]:
        """Returns the stops in (committed, until]; the sequence has just committed `until` tokens."""
        if not self.are_left:
            return ()
        first, end = bisect_right(self.token_counts, committed), bisect_right(self.token_counts, until)
        self.are_left = end < len(self.token_counts)
        return self.token_counts[first:end]

    def fork(self) -> Turn:
        """Returns the turn of a fork: the same without stops of the answer. The parent loses these stops, too."""
        if self.token_counts and self.token_counts[-1] > self.prompt_end:
            self.token_counts = tuple([stop for stop in self.token_counts if stop <= self.prompt_end])
        child = Turn(self.token_counts, self.prompt_end, self.early)
        child.last = self.last
        return child


class StopRules:
    """Computes the stops of a new sequence.

    Attributes:
        foresees: whether the pool has early stops and stops of answers.
    """

    def __init__(self, groups: Sequence[GroupSpec], edge_tokens: int, partings: Partings | None) -> None:
        kinds = {group.kind for group in groups}
        self._groups = groups
        self._edge_tokens = edge_tokens
        self._has_any = kinds != {GroupKind.FULL_ATTENTION}
        self._partings = partings
        self.foresees = partings is not None and kinds >= {GroupKind.FULL_ATTENTION, GroupKind.STATE}

    def turn(self, prompt_token_count: int, matched: int, junction: int, breakpoints: Sequence[int]) -> Turn:
        """Returns the turn of a prompt that hits `matched` tokens, with stops at breakpoints."""
        partings, end = self._partings, prompt_end(prompt_token_count, self._edge_tokens)
        if not self._has_any:
            return Turn((), end, 0)
        edge, early, found = self._edge_tokens, 0, {end, junction}
        if breakpoints:
            found.update([stop // edge * edge for stop in breakpoints if matched + edge <= stop < end])
        if self.foresees and partings is not None:
            early = early_stop(self._groups, self._edge_tokens, prompt_token_count, max(matched, junction))
            found.add(early)
            if partings.are_late:
                found.update(answer_stops(self._groups, self._edge_tokens, prompt_token_count))
        if partings is not None and partings.are_inside:
            found.update(partings.steps_before(end))
        found.discard(0)
        return Turn(tuple(sorted(found)), end, early)

    def told(self, token_counts: Sequence[int], prompt_token_count: int) -> Turn:
        """Returns the turn with the stops that the owner of a rebuilt pool reported for it; a fork has no prompt."""
        edge = self._edge_tokens
        kept = sorted({count for count in token_counts if count and not count % edge}) if self._has_any else []
        end = prompt_end(prompt_token_count, edge) if prompt_token_count else max(kept, default=0)
        return Turn(tuple(kept), end, 0)


def prompt_end(prompt_token_count: int, edge_tokens: int) -> int:
    """Returns a prompt's last edge that leaves a token to compute; 0 if it has none."""
    return (prompt_token_count - 1) // edge_tokens * edge_tokens


def early_stop(groups: Sequence[GroupSpec], edge_tokens: int, prompt_token_count: int, known_token_count: int) -> int:
    """Returns a prompt's early stop; its first `known_token_count` tokens are already known. 0 if it has none."""
    end = prompt_end(prompt_token_count, edge_tokens)
    new = end - known_token_count
    attention = sum([new // group.block_size for group in groups if group.kind is GroupKind.FULL_ATTENTION])
    if not attention or _STATE_PART * attention < sum([group.kind is GroupKind.STATE for group in groups]):
        return 0
    early = (end - new // _EARLY_PART) // edge_tokens * edge_tokens
    return early if known_token_count < early < end else 0


def answer_stops(groups: Sequence[GroupSpec], edge_tokens: int, prompt_token_count: int) -> tuple[int, ...]:
    """Returns the stops of the answer to a prompt, rising."""
    end = prompt_end(prompt_token_count, edge_tokens)
    attention = sum([end // group.block_size for group in groups if group.kind is GroupKind.FULL_ATTENTION])
    if attention < sum([group.kind is GroupKind.STATE for group in groups]):
        return ()
    stops = [end + distance * edge_tokens for distance in _DISTANCES]
    return tuple([stop for stop in stops if prompt_token_count < stop <= _TOKENS_MAX])
