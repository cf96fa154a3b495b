"""Bytes of answers that their callers have not read, and how many of them one namespace may have.

For the event loop alone.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from quire._serving.caller_shares import CallerShares
from quire.errors import QuireError, Reason

from quire_worker.scheduling.request import Delivery, Request

if TYPE_CHECKING:
    from quire_worker.sampling.logprobs import TokenLogprobs

UNREAD_BYTES_MAX = 32 << 20  # of one namespace, or as many as are left free; of all, twice as many
VALUE_BYTES = 8  # of a logprob and its token, packed
TOKEN_BYTES = 44  # as a number of Python's, with its place
PLACE_BYTES = 8  # of a number of Python's that other lists have, too
DELIVERY_BYTES = 1_024


class Unread:
    """Counts unread bytes by namespace. Those of a request are in its `unread_bytes`."""

    def __init__(self, alone_max: int) -> None:
        """Counts none at first. `alone_max`: bytes of a namespace that is alone."""
        self._bytes = CallerShares(alone_max)
        self._requests: dict[str, dict[Request, None]] = {}  # by namespace, those with unread bytes

    def take(self, request: Request, byte_count: int) -> bool:
        """Returns whether a request may have so many more, and has them then."""
        if not byte_count:
            return True
        if not self._bytes.take(request.namespace, byte_count):
            return False
        request.unread_bytes += byte_count
        self._requests.setdefault(request.namespace, {})[request] = None
        return True

    def give_back(self, request: Request, byte_count: int) -> None:
        """Takes bytes from a request that its caller has read, or that are dropped."""
        byte_count = min(byte_count, request.unread_bytes)
        if not byte_count:
            return
        self._bytes.leave(request.namespace, byte_count)
        request.unread_bytes -= byte_count
        if not request.unread_bytes:
            of_namespace = self._requests[request.namespace]
            del of_namespace[request]
            if not of_namespace:
                del self._requests[request.namespace]

    def most_of(self, request: Request) -> Request:
        """Returns the request of the same namespace that gives back most if it ends; this one if none does."""
        others = self._requests.get(request.namespace, {})
        most = max(others, key=_droppable, default=request)
        return most if _droppable(most) > _droppable(request) else request

    def refusal(self, namespace: str) -> QuireError:
        """Returns what a request ends with that has too many."""
        held = self._bytes.held_by(namespace)
        limit = self._bytes.count_max // 2
        message = f"answers of this namespace have {held:,} unread bytes, and at most {limit:,}, or as many as are left"
        return QuireError.of(Reason.LIMIT, f"{message}: read streams as they come, or ask for fewer logprobs")


def bytes_of(delivery: Delivery, *, with_values: bool = True) -> int:
    """Returns what a delivery takes until it is read; its logprobs may be counted already."""
    size = DELIVERY_BYTES + TOKEN_BYTES * len(delivery.token_ids) + sys.getsizeof(delivery.text)
    if not with_values:
        return size
    told = [each for each in (delivery.logprobs, delivery.prompt_logprobs) if each is not None]
    return size + VALUE_BYTES * sum(each.value_count for each in told)


def bytes_of_tokens(request: Request) -> int:
    """Returns what the tokens of a request take that has ended; it keeps them until it is read."""
    return PLACE_BYTES * sum(len(sample.tokens) for sample in request.samples) + TOKEN_BYTES * len(request.prompt)


def bytes_of_values(logprobs: Sequence[TokenLogprobs]) -> int:
    """Returns what logprobs of several tokens take, packed."""
    return VALUE_BYTES * len(logprobs) * (1 + len(logprobs[0].top_token_ids)) if logprobs else 0


def _droppable(request: Request) -> int:
    return request.unread_bytes - request.being_read_bytes
