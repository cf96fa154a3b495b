"""What was generated and not handed out yet: several tokens of a stream in one message, where they come fast.

    1. noted      the token is part of its sample's text; nobody was told
    2. delivered  what was noted of a request is decoded, and lies in its queue

A request's first token and a sample's end are delivered as soon as the event loop is free, what comes between once in
an interval. A message costs worker and client the same whatever is in it, and a small model decodes a token in a
millisecond: each by itself, they would cost more than the model. Where a turn takes longer than the interval, every
token is a message.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from quire_worker.model.tokenizer import TokenizerError
from quire_worker.scheduling.request import Delivery, Request, Sample


class Outbox:
    """Tokens on their way to the queues of their requests. For the event loop alone.

    Args:
        interval_s: between two messages of one request, at least, but for its first one and those that end a sample.
        on_failure: told of a request whose tokens the tokenizer cannot decode; none of its tokens are noted any more.
    """

    def __init__(self, interval_s: float, on_failure: Callable[[Request, TokenizerError], None]) -> None:
        self._interval_s = interval_s
        self._on_failure = on_failure
        self._noted: dict[Request, dict[Sample, list[int]]] = {}
        self._timer: asyncio.TimerHandle | None = None

    def note(self, sample: Sample, tokens: Sequence[int]) -> None:
        """Takes new tokens of a sample; none if it ended without one."""
        self._noted.setdefault(sample.request, {}).setdefault(sample, []).extend(tokens)
        loop = asyncio.get_running_loop()
        due_s = loop.time() if sample.has_ended else sample.request.delivered_s + self._interval_s
        if self._timer is None or due_s < self._timer.when():
            if self._timer is not None:
                self._timer.cancel()
            self._timer = loop.call_at(due_s, self._deliver_due)

    def deliver(self, request: Request) -> None:
        """Delivers what was noted of a request, without waiting for its time."""
        noted = self._noted.pop(request, None)
        if noted is None:
            return
        request.delivered_s = asyncio.get_running_loop().time()
        try:
            deliveries = [_delivery(sample, tokens) for sample, tokens in noted.items()]
        except TokenizerError as error:
            self._on_failure(request, error)
            return
        for number, delivery in enumerate(deliveries, start=1):
            is_last = request.is_done and number == len(deliveries)
            request.deliveries.put_nowait(delivery._replace(is_last=is_last))

    def discard(self, request: Request) -> None:
        """Forgets what was noted of a request, because nobody reads its queue any more."""
        self._noted.pop(request, None)

    def _deliver_due(self) -> None:
        """Delivers what is due, and comes again when the next is."""
        self._timer = None
        loop = asyncio.get_running_loop()
        now_s, next_s = loop.time(), None
        for request, noted in list(self._noted.items()):
            due_s = request.delivered_s + self._interval_s
            if due_s <= now_s or any(sample.has_ended for sample in noted):
                self.deliver(request)
            elif next_s is None or due_s < next_s:
                next_s = due_s
        if next_s is not None:
            self._timer = loop.call_at(next_s, self._deliver_due)


def _delivery(sample: Sample, tokens: list[int]) -> Delivery:
    """Decodes tokens of a sample.

    Raises:
        TokenizerError: the tokenizer cannot do it.
    """
    text = sample.detokenizer.push(tokens)
    if sample.has_ended:
        text += sample.detokenizer.flush()
    return Delivery(sample.index, tuple(tokens), text, sample.finish_reason, is_last=False)
