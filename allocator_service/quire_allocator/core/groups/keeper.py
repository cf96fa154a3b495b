"""What runs and units ask of whoever keeps the boundaries of a pool (`retention.py`): an interface, so that they need
not know how boundaries are made."""

from __future__ import annotations

from abc import ABC, abstractmethod

from quire_allocator.core.blocks import Scoped
from quire_allocator.core.boundary import Boundary


class Keeper(ABC):
    """Ends boundaries, and says what runs bear."""

    @abstractmethod
    def end(self, boundary: Boundary) -> None:
        """No hit can end there any more."""

    @abstractmethod
    def burden(self, run: Scoped) -> int:
        """Returns `Entry.burden` of a run in which a boundary stands."""

    @abstractmethod
    def moved(self, lower: Scoped, upper: Scoped, cut: int) -> None:
        """A run was split: boundaries of up to `cut` tokens stand in its upper part from now on."""

    @abstractmethod
    def trimmed(self, run: Scoped, end: int) -> None:
        """A run is about to end after so many tokens: boundaries beyond are gone."""
