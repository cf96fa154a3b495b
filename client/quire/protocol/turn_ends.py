"""Ends of turns: token counts after which later prompts may go on otherwise, named by the owner of a new sequence."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from quire.protocol.limits import TURN_ENDS_MAX


def check(ends: Sequence[int]) -> None:
    """Checks those of one sequence.

    Raises:
        ValueError: they are too many, or do not rise.
    """
    if len(ends) > TURN_ENDS_MAX:
        raise ValueError(f"a sequence names at most {TURN_ENDS_MAX} ends of turns, not {len(ends)}")
    if any(end <= before for before, end in zip((0, *ends), ends, strict=False)):
        raise ValueError("ends of turns must rise, and begin above 0")


def deal(counts: Sequence[int], ends: array[int]) -> list[array[int]]:
    """Deals those of each grow of a step, from its two columns: how many each has, and all of them.

    Raises:
        ValueError: the columns disagree.
    """
    if len(ends) != sum(counts):
        raise ValueError("turn_end_counts and turn_ends disagree")
    dealt, first = [], 0
    for count in counts:
        dealt.append(ends[first : first + count])
        first += count
    return dealt
