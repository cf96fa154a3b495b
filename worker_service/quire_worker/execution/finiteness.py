"""Which rows of logits are finite. To read it is to wait for the device: it is read with the tokens where it can be."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from quire_worker.execution.parts import Part


class Finiteness:
    """What is not known yet of the parts of a pass.

    Args:
        on_failure: told of each part that is found not to be finite.
    """

    def __init__(self, on_failure: Callable[[Part], None]) -> None:
        self._on_failure = on_failure
        self._parts: list[Part] = []
        self._flags: list[torch.Tensor] = []

    def add(self, parts: Sequence[Part], flags: torch.Tensor) -> None:
        """Takes flags that are still to be read, bool `[rows]`, of all rows of these parts."""
        self._parts += parts
        self._flags.append(flags)

    def unread(self) -> torch.Tensor | None:
        """Returns all flags that are to be read; None if there are none."""
        return torch.cat(self._flags) if self._flags else None

    def take(self, flags: Sequence[bool]) -> None:
        """Takes what was read of `unread`; nothing where that was None."""
        if flags:
            self.judge(self._parts, flags)
            self._parts, self._flags = [], []

    def read(self) -> None:
        """Reads what nobody has read along with tokens: parts of prompts."""
        flags = self.unread()
        if flags is not None:
            self.take(flags.tolist())

    def judge(self, parts: Sequence[Part], flags: Sequence[bool]) -> None:
        """Tells of the parts that are not finite."""
        end = 0
        for part in parts:
            start, end = end, end + part.row_count
            if not all(flags[start:end]):
                self._on_failure(part)
