"""Answers of the twin, as plain tuples."""

from __future__ import annotations

# The answer to an allocate or a grow: result, matched and pending tokens, blocks, copies, shortfall, victim, junction,
# stops.
Grown = tuple[str, int, int, list[list[int]], list[tuple[int, int]], int, tuple[int, int] | None, int, tuple[int, ...]]
Committed = tuple[str, list[tuple[int, int, int]]]  # (result, swaps); a swap is (group, position, block)


def refused(result: str) -> Grown:
    """Returns an answer with this result and nothing else."""
    return (result, 0, 0, [], [], 0, None, 0, ())
