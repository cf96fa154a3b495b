"""The refusals of the protocol."""

from __future__ import annotations


class Refusal(Exception):
    """A request that the protocol refuses; `reason` is a name of `quire.v1.Reason`. Nothing has changed.

    `retry_after_s` is set where more is known about when to come back than the reason alone says, and `field` where one
    field of the request is to blame, by its name on the wire.
    """

    def __init__(self, reason: str, message: str, retry_after_s: float | None = None, field: str | None = None) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.retry_after_s = retry_after_s
        self.field = field
