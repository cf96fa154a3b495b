"""How many connections there are at a time, and which one makes room for the next."""

from __future__ import annotations

from typing import Protocol


class Waiting(Protocol):
    """A connection that waits for a request."""

    def make_room(self) -> None:
        """Ends the connection at once."""


class Connections:
    """The connections that wait for a request, the longest first.

    Beyond the limit, the one that waits longest is ended: clients send their requests at once, and open idle
    connections again. A connection whose request is being read or answered is none of these; requests have limits of
    their own.

    Args:
        waiting_max: that may wait.
    """

    def __init__(self, waiting_max: int) -> None:
        self._waiting: dict[Waiting, None] = {}
        self._waiting_max = waiting_max

    def add(self, connection: Waiting) -> None:
        """Lets it wait, behind the others."""
        self._waiting[connection] = None
        if len(self._waiting) > self._waiting_max:
            longest = next(iter(self._waiting))
            del self._waiting[longest]
            longest.make_room()

    def discard(self, connection: Waiting) -> None:
        """Forgets one that does not wait any more."""
        self._waiting.pop(connection, None)
