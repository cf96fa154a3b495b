"""Which rows of logits are finite. To read it is to wait for the device: it is read with the tokens where it can be."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from quire_worker.execution.parts import Part


class Finiteness:
    """Flags of a pass's parts that the host has not read yet: whether their logits are finite.

    Holds no reference to its owner: a cycle would keep the pass's logits alive until the garbage collector runs.
    """

    def __init__(self) -> None:
        self._parts: list[Part] = []
        self._flags: list[torch.Tensor] = []

    def add(self, parts: Sequence[Part], flags: torch.Tensor) -> None:
        """Takes flags that are still to be read, bool `[rows]`, of all rows of these parts."""
        self._parts += parts
        self._flags.append(flags)

    def unread(self) -> torch.Tensor | None:
        """Returns all flags that are to be read; None if there are none."""
        return torch.cat(self._flags) if self._flags else None

    def take(self, flags: Sequence[int]) -> list[Part]:
        """Takes what was read of `unread`, nothing where that was None, and returns the parts that are not finite."""
        if not flags:
            return []
        parts, self._parts, self._flags = self._parts, [], []
        return not_finite(parts, flags)

    def read(self) -> list[Part]:
        """Reads the flags that were not read with tokens (parts of prompts). Returns the parts that are not finite."""
        flags = self.unread()
        return [] if flags is None else self.take(flags.tolist())


def not_finite(parts: Sequence[Part], flags: Sequence[int]) -> list[Part]:
    """Returns the parts that are not finite in all of their rows."""
    found, end = [], 0
    for part in parts:
        start, end = end, end + part.row_count
        if not all(flags[start:end]):
            found.append(part)
    return found
