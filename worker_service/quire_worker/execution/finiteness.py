"""Flags of the finite rows of logits. Reading the flags waits for the device, so they are read with the tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from quire_worker.execution.parts import Part


class Finiteness:
    """Flags on the device that the host has not read yet: whether the logits of a pass's parts are finite.

    Holds no reference to its owner: a cycle would keep the pass's logits alive until the garbage collector runs.
    """

    def __init__(self) -> None:
        self._parts: list[Part] = []
        self._flags: list[torch.Tensor] = []

    def add(self, parts: Sequence[Part], flags: torch.Tensor) -> None:
        """Adds unread flags: bool `[rows]`, one for each row of these parts."""
        self._parts += parts
        self._flags.append(flags)

    def unread(self) -> torch.Tensor | None:
        """Returns all unread flags as one tensor; None if there are none."""
        return torch.cat(self._flags) if self._flags else None

    def take(self, flags: Sequence[int]) -> list[Part]:
        """Takes the values of `unread` (empty if that was None). Returns the parts that are not finite."""
        if not flags:
            return []
        parts, self._parts, self._flags = self._parts, [], []
        return not_finite(parts, flags)

    def read(self) -> list[Part]:
        """Reads the flags of prompt parts, which have no tokens to read. Returns the parts that are not finite."""
        flags = self.unread()
        return [] if flags is None else self.take(flags.tolist())


def not_finite(parts: Sequence[Part], flags: Sequence[int]) -> list[Part]:
    """Returns the parts with at least one row that is not finite."""
    found, end = [], 0
    for part in parts:
        start, end = end, end + part.row_count
        if not all(flags[start:end]):
            found.append(part)
    return found
