"""What runs and units ask of whoever keeps the stops of a pool (`retention.py`): an interface, so that they need
not know how stops are made."""

from __future__ import annotations

from abc import ABC, abstractmethod

from quire_allocator.core.blocks import Scoped
from quire_allocator.core.retention.stop import Stop


class Keeper(ABC):
    """Ends stops, and says what runs bear."""

    @abstractmethod
    def end(self, stop: Stop) -> None:
        """No hit can end there any more."""

    @abstractmethod
    def burden(self, run: Scoped) -> int:
        """Returns `Entry.burden` of a run in which a stop stands."""

    @abstractmethod
    def moved(self, lower: Scoped, upper: Scoped, cut: int) -> None:
        """A run was split: stops of up to `cut` tokens stand in its upper part from now on."""

    @abstractmethod
    def trimmed(self, run: Scoped, end: int) -> None:
        """A run is about to end after so many tokens: stops beyond are gone."""
