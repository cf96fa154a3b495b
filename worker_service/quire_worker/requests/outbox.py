"""Tokens that were generated and not handed out yet. A fast stream gets several of them in one message.

    1. noted      the token is part of its sample's text; its caller does not have it yet
    2. delivered  the noted tokens of a request are decoded, and lie in its queue
    3. being read  gRPC has a delivery, and waits for the request's caller to take it
    4. read       the caller asks for more, or gRPC's own buffers hold it

From 1 with logprobs, from 2 else, to 3 a request's bytes count as unread (`unread.py`). If its namespace has too many,
that request of it ends that has most: LIMIT.

A request's first token and a sample's end are delivered as soon as the event loop is free; tokens between them once in
an interval. A message costs worker and client the same whatever is in it, and a small model decodes a token in a
millisecond: one message a token would cost more than the model. If a turn takes longer than the interval, every token
is a message.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from quire.errors import QuireError

from quire_worker.model.tokenizer import TokenizerError
from quire_worker.requests.unread import (
    UNREAD_BYTES_MAX,
    VALUE_BYTES,
    Unread,
    bytes_of,
    bytes_of_tokens,
    bytes_of_values,
)
from quire_worker.sampling.logprobs import TokenLogprobs
from quire_worker.sampling.packed_logprobs import PackedLogprobs
from quire_worker.scheduling.request import Delivery, Request, Sample


class Noted(NamedTuple):
    """Noted tokens of one sample, and their logprobs."""

    tokens: list[int]
    logprobs: PackedLogprobs  # of each token, if they were asked for; else empty


class Outbox:
    """Tokens on their way to the queues of their requests. For the event loop alone.

    Args:
        interval_s: least time between two messages of one request, except for its first message and those that end a
            sample. A request may have a longer interval.
        on_failure: called with a request whose tokens the tokenizer cannot decode, or whose caller does not read them;
            its further tokens are dropped.
        unread_bytes_max: of one namespace.
    """

    def __init__(
        self,
        interval_s: float,
        on_failure: Callable[[Request, TokenizerError | QuireError], None],
        unread_bytes_max: int = UNREAD_BYTES_MAX,
    ) -> None:
        self._interval_s = interval_s
        self._unread = Unread(unread_bytes_max)
        self._on_failure = on_failure
        self._noted: dict[Request, dict[Sample, Noted]] = {}
        self._first: list[Request] = []  # whose first tokens were noted since `deliver_first`
        self._timer: asyncio.TimerHandle | None = None
        self._timer_s = math.inf  # when it comes

    def note(self, sample: Sample, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs] = ()) -> None:
        """Takes new tokens of a sample; none if it ended without one."""
        if logprobs and not self._hold(sample.request, bytes_of_values(logprobs)):
            return
        noted = self._noted.setdefault(sample.request, {}).setdefault(sample, Noted([], PackedLogprobs()))
        noted.tokens.extend(tokens)
        noted.logprobs.put(len(noted.logprobs), logprobs)
        if _is_held(sample.request):
            return
        if sample.request.delivered_s == -math.inf:
            self._first.append(sample.request)
        loop = asyncio.get_running_loop()
        due_s = loop.time() if sample.has_ended else self._due_s(sample.request)
        if due_s < self._timer_s:
            if self._timer is not None:
                self._timer.cancel()
            self._timer, self._timer_s = loop.call_at(due_s, self._deliver_due), due_s

    def note_prompt(self, request: Request, place: int, logprobs: Sequence[TokenLogprobs]) -> None:
        """Takes logprobs of a prompt, at a place where others may be; they go with the request's first delivery."""
        if request.is_done:
            return
        told = request.prompt_logprobs = request.prompt_logprobs or PackedLogprobs()
        before = told.value_count
        told.put(place, logprobs)
        self._hold(request, VALUE_BYTES * (told.value_count - before))

    async def next_delivery(self, request: Request) -> Delivery | QuireError:
        """Waits for what a request's caller gets next. What it got before counts as read."""
        self._unread.give_back(request, request.being_read_bytes)
        request.being_read_bytes = 0
        delivery = await request.deliveries.get()
        if isinstance(delivery, Delivery):
            request.being_read_bytes = bytes_of(delivery)
        return delivery

    async def deliver_first(self) -> None:
        """Delivers the first tokens of requests, and lets the tasks that wait for them run before the event loop does
        anything else."""
        first, self._first = self._first, []
        for request in first:
            self.deliver(request)
        if first:
            await asyncio.sleep(0)

    def deliver(self, request: Request) -> None:
        """Delivers the noted tokens of a request, without waiting for its time."""
        noted = self._noted.pop(request, None)
        if noted is None:
            return
        is_first = request.delivered_s == -math.inf
        request.delivered_s = asyncio.get_running_loop().time()
        if request.sampling.is_best_of:
            noted = _best(request, noted)
        try:
            deliveries = [_delivery(sample, *each) for sample, each in noted.items()]
        except TokenizerError as error:
            self._on_failure(request, error)
            return
        if request.sampling.is_best_of:
            deliveries = [delivery._replace(sample=place) for place, delivery in enumerate(deliveries)]
        if is_first and request.prompt_logprobs:
            deliveries[0] = deliveries[0]._replace(prompt_logprobs=request.prompt_logprobs)
            request.prompt_logprobs = None
        byte_count = sum(bytes_of(each, with_values=False) for each in deliveries)
        if not self._hold(request, byte_count + (bytes_of_tokens(request) if request.is_done else 0)):
            return
        for number, delivery in enumerate(deliveries, start=1):
            is_last = request.is_done and number == len(deliveries)
            request.deliveries.put_nowait(delivery._replace(is_last=is_last))

    def discard(self, request: Request) -> None:
        """Forgets the noted tokens of a request, because nobody reads its queue any more."""
        self._noted.pop(request, None)
        self._unread.give_back(request, request.unread_bytes)

    def _hold(self, request: Request, byte_count: int) -> bool:
        """Counts bytes of a request as unread; False if there is no room, and the request ended."""
        while not self._unread.take(request, byte_count):
            most, refusal = self._unread.most_of(request), self._unread.refusal(request.namespace)
            self._drop(most)
            self._on_failure(most, refusal)
            most.let_go()
            if most is request:
                return False
        return True

    def _drop(self, request: Request) -> None:
        """Forgets all of a request but what is being read."""
        self._noted.pop(request, None)
        request.prompt_logprobs = None
        while not request.deliveries.empty():
            request.deliveries.get_nowait()
        self._unread.give_back(request, request.unread_bytes - request.being_read_bytes)

    def _due_s(self, request: Request) -> float:
        return request.delivered_s + max(self._interval_s, request.interval_s)

    def _deliver_due(self) -> None:
        """Delivers what is due, and comes again when the next is."""
        self._timer, self._timer_s = None, math.inf
        loop = asyncio.get_running_loop()
        now_s, next_s = loop.time(), None
        for request, noted in list(self._noted.items()):
            if _is_held(request):
                continue
            due_s = self._due_s(request)
            if due_s <= now_s or any(sample.has_ended for sample in noted):
                self.deliver(request)
            elif next_s is None or due_s < next_s:
                next_s = due_s
        if next_s is not None:
            self._timer, self._timer_s = loop.call_at(next_s, self._deliver_due), next_s


def _is_held(request: Request) -> bool:
    """Tells whether nothing of a request goes out yet: which of its samples are the best is known at the end."""
    return request.sampling.is_best_of and not request.is_done


def _best(request: Request, noted: dict[Sample, Noted]) -> dict[Sample, Noted]:
    """Returns the likeliest samples of a request, by the mean of their tokens' logprobs; of equals the first."""
    ranked = sorted(noted, key=lambda sample: -sample.logprob_sum / max(1, sample.output_token_count))
    return {sample: noted[sample] for sample in ranked[: request.sampling.n]}


def _delivery(sample: Sample, tokens: list[int], logprobs: PackedLogprobs) -> Delivery:
    """Decodes tokens of a sample.

    Raises:
        TokenizerError: the tokenizer cannot do it.
    """
    text = sample.detokenizer.push(tokens)
    if sample.has_ended:
        text += sample.detokenizer.flush()
    return Delivery(
        sample.index,
        tuple(tokens),
        text,
        sample.finish_reason,
        is_last=False,
        logprobs=logprobs or None,
        stop_reason=sample.stop_reason,
    )
