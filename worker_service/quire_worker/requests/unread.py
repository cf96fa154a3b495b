"""Counts the bytes of answers that callers have not read, and limits them for each namespace.

Only the event loop uses this module.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from quire._serving.caller_shares import CallerShares
from quire.errors import QuireError, Reason

from quire_worker.scheduling.output import Delivery
from quire_worker.scheduling.request import Request

if TYPE_CHECKING:
    from quire_worker.sampling.logprobs import TokenLogprobs

# Most unread bytes of a namespace that is alone. All namespaces together may have twice as many bytes, and each of them
# may have at most as many as remain free.
UNREAD_BYTES_MAX = 32 << 20
VALUE_BYTES = 8  # bytes of a packed logprob and its token
TOKEN_BYTES = 44  # bytes of a token as a Python number, with the list's pointer
PLACE_BYTES = 8  # bytes of a token's index in another list
DELIVERY_BYTES = 1_024


class Unread:
    """Counts unread bytes by namespace. The bytes of a request are in its `output`."""

    def __init__(self, alone_max: int) -> None:
        """Starts without unread bytes. `alone_max` is the limit of a namespace that is alone."""
        self._bytes = CallerShares(alone_max)
        self._requests: dict[str, dict[Request, None]] = {}  # requests with unread bytes, by namespace

    def take(self, request: Request, byte_count: int) -> bool:
        """Counts more unread bytes of a request, if its namespace may have them. Returns whether the namespace may."""
        if not byte_count:
            return True
        if not self._bytes.take(request.namespace, byte_count):
            return False
        request.output.unread_bytes += byte_count
        self._requests.setdefault(request.namespace, {})[request] = None
        return True

    def give_back(self, request: Request, byte_count: int) -> None:
        """Uncounts bytes of a request that its caller has read, or that are dropped."""
        byte_count = min(byte_count, request.output.unread_bytes)
        if not byte_count:
            return
        self._bytes.leave(request.namespace, byte_count)
        request.output.unread_bytes -= byte_count
        if not request.output.unread_bytes:
            of_namespace = self._requests[request.namespace]
            del of_namespace[request]
            if not of_namespace:
                del self._requests[request.namespace]

    def most_of(self, request: Request) -> Request:
        """Returns the request of the same namespace with the most bytes to free; among equal requests, this one."""
        others = self._requests.get(request.namespace, {})
        most = max(others, key=_droppable, default=request)
        return most if _droppable(most) > _droppable(request) else request

    def refusal(self, namespace: str) -> QuireError:
        """Returns the error of a request that has too many unread bytes."""
        held = self._bytes.held_by(namespace)
        limit = self._bytes.count_max // 2
        message = (
            f"answers of this namespace have {held:,} unread bytes; allowed are {limit:,}, or as many as other "
            "namespaces leave free"
        )
        return QuireError.of(Reason.LIMIT, f"{message}: read streams faster, or ask for fewer logprobs")


def bytes_of(delivery: Delivery, *, with_values: bool = True) -> int:
    """Returns the bytes of a delivery until it is read. The delivery's logprobs may have been counted before."""
    size = DELIVERY_BYTES + TOKEN_BYTES * len(delivery.token_ids) + sys.getsizeof(delivery.text)
    if not with_values:
        return size
    told = [each for each in (delivery.logprobs, delivery.prompt_logprobs) if each is not None]
    return size + VALUE_BYTES * sum(each.value_count for each in told)


def bytes_of_tokens(request: Request) -> int:
    """Returns the bytes for the tokens of a request that has ended. The request keeps these bytes until its answer is
    read.
    """
    return PLACE_BYTES * sum(len(sample.tokens) for sample in request.samples) + TOKEN_BYTES * len(request.prompt)


def bytes_of_values(logprobs: Sequence[TokenLogprobs]) -> int:
    """Returns the bytes of the packed logprobs of several tokens."""
    return VALUE_BYTES * len(logprobs) * (1 + len(logprobs[0].top_token_ids)) if logprobs else 0


def _droppable(request: Request) -> int:
    return request.output.unread_bytes - request.output.being_read_bytes
