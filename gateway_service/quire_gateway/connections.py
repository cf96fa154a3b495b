"""Limits the number of idle connections: at the limit, a new connection ends the oldest one."""

from __future__ import annotations

from typing import Protocol


class Waiting(Protocol):
    """A connection that waits for a request."""

    def make_room(self) -> None:
        """Ends the connection at once."""


class Connections:
    """The connections that wait for a request, the longest waiting first.

    Beyond the limit, the connection that has waited longest is ended: clients send their requests at once, and reopen
    idle connections. A connection with a request that is being read or answered does not count here: requests have
    limits of their own.

    Args:
        waiting_max: the number of connections that may wait.
    """

    def __init__(self, waiting_max: int) -> None:
        self._waiting: dict[Waiting, None] = {}
        self._waiting_max = waiting_max

    def add(self, connection: Waiting) -> None:
        """Adds a connection as the newest one."""
        self._waiting[connection] = None
        if len(self._waiting) > self._waiting_max:
            longest = next(iter(self._waiting))
            del self._waiting[longest]
            longest.make_room()

    def discard(self, connection: Waiting) -> None:
        """Removes a connection that no longer waits."""
        self._waiting.pop(connection, None)
