"""Tokens that were generated but not handed out yet. For a fast stream, several tokens share one message.

    1. noted        the token is part of its sample's text, but not in a message yet
    2. delivered    the noted tokens of a request are decoded, and wait in its queue
    3. being read   gRPC has the delivery, and waits for the caller to take it
    4. read         the caller asks for more, or gRPC's own buffers hold the delivery

The bytes of a request count as unread from state 1 (with logprobs) or 2 (without) until state 4 (`unread.py`). If a
namespace has too many unread bytes, the request with the most unread bytes fails with LIMIT.

A request's first token and a sample's end are delivered as soon as the event loop is free. Tokens in between are
delivered once per interval. A message costs worker and client the same for any number of tokens. A small model decodes
a token in a millisecond, so one message per token would cost more than the model. If a turn takes longer than the
interval, every token is a message.
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
from quire_worker.scheduling.output import Delivery
from quire_worker.scheduling.request import Request, Sample


class Noted(NamedTuple):
    """Noted tokens of one sample, with their logprobs."""

    tokens: list[int]
    logprobs: PackedLogprobs  # logprobs of each token if they were requested; otherwise empty


class Outbox:
    """Holds generated tokens until they go to the queues of their requests. Only the event loop uses this.

    Args:
        interval_s: least seconds between two messages of one request, except its first message and the last message of
            each sample. A request may have a longer interval.
        on_failure: called with a request with tokens that cannot be decoded, or with a caller that does not read them.
            The request's further tokens are dropped.
        unread_bytes_max: the most unread bytes of a single namespace.
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
        self._first: list[Request] = []  # requests with first tokens that were noted since the last `deliver_first`
        self._timer: asyncio.TimerHandle | None = None
        self._timer_s = math.inf  # time when the timer fires, by the event loop's clock

    def note(self, sample: Sample, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs] = ()) -> None:
        """Adds new tokens of a sample; no tokens if the sample ended without one."""
        if logprobs and not self._hold(sample.request, bytes_of_values(logprobs)):
            return
        noted = self._noted.setdefault(sample.request, {}).setdefault(sample, Noted([], PackedLogprobs()))
        noted.tokens.extend(tokens)
        noted.logprobs.put(len(noted.logprobs), logprobs)
        if _is_held(sample.request):
            return
        if sample.request.output.delivered_s == -math.inf:
            self._first.append(sample.request)
        loop = asyncio.get_running_loop()
        due_s = loop.time() if sample.has_ended else self._due_s(sample.request)
        if due_s < self._timer_s:
            if self._timer is not None:
                self._timer.cancel()
            self._timer, self._timer_s = loop.call_at(due_s, self._deliver_due), due_s

    def note_prompt(self, request: Request, place: int, logprobs: Sequence[TokenLogprobs]) -> None:
        """Adds logprobs of a prompt, at a position among its tokens. The request's first delivery contains them."""
        if request.is_done:
            return
        told = request.output.prompt_logprobs = request.output.prompt_logprobs or PackedLogprobs()
        before = told.value_count
        told.put(place, logprobs)
        self._hold(request, VALUE_BYTES * (told.value_count - before))

    async def next_delivery(self, request: Request) -> Delivery | QuireError:
        """Waits for the next delivery of a request. The previous delivery counts as read."""
        self._unread.give_back(request, request.output.being_read_bytes)
        request.output.being_read_bytes = 0
        delivery = await request.output.deliveries.get()
        if isinstance(delivery, Delivery):
            request.output.being_read_bytes = bytes_of(delivery)
        return delivery

    async def deliver_first(self) -> None:
        """Delivers the first tokens of requests. Lets the tasks that wait for them run before anything else."""
        first, self._first = self._first, []
        for request in first:
            self.deliver(request)
        if first:
            await asyncio.sleep(0)

    def deliver(self, request: Request) -> None:
        """Delivers the noted tokens of a request at once, without waiting for the interval."""
        noted = self._noted.pop(request, None)
        if noted is None:
            return
        is_first = request.output.delivered_s == -math.inf
        request.output.delivered_s = asyncio.get_running_loop().time()
        if request.sampling.is_best_of:
            noted = _best(request, noted)
        try:
            deliveries = [_delivery(sample, *each) for sample, each in noted.items()]
        except TokenizerError as error:
            self._on_failure(request, error)
            return
        if request.sampling.is_best_of:
            deliveries = [delivery._replace(sample=place) for place, delivery in enumerate(deliveries)]
        if is_first and request.output.prompt_logprobs:
            deliveries[0] = deliveries[0]._replace(prompt_logprobs=request.output.prompt_logprobs)
            request.output.prompt_logprobs = None
        byte_count = sum(bytes_of(each, with_values=False) for each in deliveries)
        if not self._hold(request, byte_count + (bytes_of_tokens(request) if request.is_done else 0)):
            return
        for number, delivery in enumerate(deliveries, start=1):
            is_last = request.is_done and number == len(deliveries)
            request.output.deliveries.put_nowait(delivery._replace(is_last=is_last))

    def discard(self, request: Request) -> None:
        """Drops the noted tokens of a request, because its queue is no longer read."""
        self._noted.pop(request, None)
        self._unread.give_back(request, request.output.unread_bytes)

    def _hold(self, request: Request, byte_count: int) -> bool:
        """Counts bytes of a request as unread. Returns False if there is no room, and the request has ended."""
        while not self._unread.take(request, byte_count):
            most, refusal = self._unread.most_of(request), self._unread.refusal(request.namespace)
            self._drop(most)
            self._on_failure(most, refusal)
            most.let_go()
            if most is request:
                return False
        return True

    def _drop(self, request: Request) -> None:
        """Drops all data of a request except the delivery that is being read."""
        self._noted.pop(request, None)
        request.output.prompt_logprobs = None
        while not request.output.deliveries.empty():
            request.output.deliveries.get_nowait()
        self._unread.give_back(request, request.output.unread_bytes - request.output.being_read_bytes)

    def _due_s(self, request: Request) -> float:
        return request.output.delivered_s + max(self._interval_s, request.output.interval_s)

    def _deliver_due(self) -> None:
        """Delivers the requests that are due, and sets the timer for the next request."""
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
    """Returns whether a request delivers nothing yet, because its best samples are known only at the end."""
    return request.sampling.is_best_of and not request.is_done


def _best(request: Request, noted: dict[Sample, Noted]) -> dict[Sample, Noted]:
    """Returns the samples with the highest mean logprob of their tokens; of equal samples, the first."""
    ranked = sorted(noted, key=lambda sample: -sample.logprob_sum / max(1, sample.output_token_count))
    return {sample: noted[sample] for sample in ranked[: request.sampling.n]}


def _delivery(sample: Sample, tokens: list[int], logprobs: PackedLogprobs) -> Delivery:
    """Decodes tokens of a sample into a delivery.

    Raises:
        TokenizerError: the tokenizer fails.
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
