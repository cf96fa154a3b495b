"""The refusals of the protocol."""

from __future__ import annotations


class Refusal(Exception):
    """A request that the protocol refuses; `reason` is a name of `quire.v1.Reason`. Nothing has changed.

    `retry_after_s` is set if the time for a retry is known better than from the reason alone. `field` is the wire
    name of the request's invalid field, if there is one.
    """

    def __init__(self, reason: str, message: str, retry_after_s: float | None = None, field: str | None = None) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.retry_after_s = retry_after_s
        self.field = field
