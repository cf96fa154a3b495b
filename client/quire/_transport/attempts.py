"""Retries calls that stream messages, because gRPC itself must not retry them: see `channel`."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import grpc
from google.protobuf.message import Message

from quire._transport.backoff import Backoff
from quire._transport.channel import ATTEMPTS_MAX, BACKOFF_S, BACKOFF_S_MAX, Link
from quire._transport.inherited import inheritable
from quire._transport.timeouts import checked_timeout
from quire.errors import QuireError

ItemT = TypeVar("ItemT")


class Attempts(Generic[ItemT]):
    """A call that streams messages, and its retries: the same policy as `_SERVICE_CONFIG` has for unary calls.

    Args:
        link: the stub's connection.
        method: a method of a blocking or asyncio stub.
        request: sent with each attempt.
        read: converts a message to the caller's value.
        timeout_s: limit for all attempts together, including pauses.

    Attributes:
        call: the current attempt.
        request_id: the call's id, for its errors.
        timeout_s: the argument of the same name.
    """

    def __init__(
        self,
        link: Link,
        method: Callable[..., Any],
        request: Message,
        read: Callable[[Any], ItemT],
        timeout_s: float,
    ) -> None:
        link.check_size(request)
        self._link = link
        self._method = method
        self._request = request
        self.timeout_s = timeout_s = checked_timeout(timeout_s)
        self._deadline = time.monotonic() + timeout_s
        self._count = 1
        self._backoff = Backoff(BACKOFF_S, BACKOFF_S_MAX)
        self._begun = False
        self._read = read
        self.request_id = getattr(request, "request_id", None)
        self.call = self._start(timeout_s)

    def _start(self, left_s: float) -> Any:
        self._link.check_open()
        return inheritable(self._method(self._request, timeout=left_s, metadata=self._link.call_metadata()))

    def read(self, message: Any) -> ItemT:
        """Converts a message for the caller. After the first message the call is never retried."""
        self._begun = True
        return self._read(message)

    def pause_s(self, error: QuireError) -> float | None:
        """Returns the seconds to wait before `again`, or None if the current attempt's error is final."""
        if self._begun or error.code != grpc.StatusCode.UNAVAILABLE or self._count >= ATTEMPTS_MAX:
            return None
        pause_s = self._backoff.next_s(error.retry_after_s)
        return pause_s if time.monotonic() + pause_s < self._deadline else None

    def again(self) -> None:
        """Starts the next attempt, within the remaining time."""
        self._count += 1
        self.call = self._start(max(self._deadline - time.monotonic(), 0.0))
