"""Answers as they are sent: whole, or piece by piece, until they end or their caller has gone."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from contextlib import aclosing
from typing import Final

import orjson
import structlog
from quire.sampling import Chunk, FinishReason
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from quire_gateway import relay
from quire_gateway.failures import ApiError
from quire_gateway.fleet import Fleet
from quire_gateway.metrics import Telemetry
from quire_gateway.relay import Call
from quire_gateway.replies import DONE, Answer, Form, Taken

log = structlog.get_logger()

_STREAM_HEADERS: Final = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # a proxy that collects pieces would undo the stream
]


class CallerGoneError(Exception):
    """Nobody reads the answer any more."""


class Served(Response):
    """One answer. Whatever way it ends, what was not finished at the workers is cancelled.

    Args:
        fleet: the workers.
        call: what is asked.
        form: the shape of the answer.
        telemetry: what is counted.
        started_s: when the request came, on the scale of `time.monotonic`.
    """

    def __init__(
        self,
        fleet: Fleet,
        call: Call,
        form: Form,
        telemetry: Telemetry,
        started_s: float,
    ) -> None:
        super().__init__()
        self._fleet, self._call, self._form = fleet, call, form
        self._telemetry, self._started_s = telemetry, started_s
        self._taken = Taken()
        self._waits_for_first = True

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends it.

        Raises:
            ApiError: nothing was sent yet, and nothing can be answered.
        """
        answer = self._stream(send) if self._call.ask.is_streamed else self._whole(send)
        try:
            await until_gone(receive, answer)
        except CallerGoneError:
            self._telemetry.left_count += 1
            log.info("caller left", request_id=self._call.request_id)

    async def _whole(self, send: Send) -> None:
        """Sends all choices in one answer."""
        count = self._call.ask.choice_count
        texts: list[list[str]] = [[] for _ in range(count * len(self._call.tokens))]
        reasons: list[FinishReason | None] = [None] * len(texts)
        async with aclosing(relay.pieces(self._fleet, self._call)) as pieces:
            async for number, chunk in pieces:
                index = number * count + chunk.sample
                texts[index].append(chunk.text)
                reasons[index] = chunk.finish_reason or reasons[index]
                self._note(chunk)
        self._check_whole(reasons)
        answers = [Answer("".join(parts), reason, None) for parts, reason in zip(texts, reasons, strict=True)]
        body = self._form.whole(answers, self._taken)
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _stream(self, send: Send) -> None:
        """Sends each piece as it comes. What fails after the first one is told as the stream's last event."""
        count, form = self._call.ask.choice_count, self._form
        reasons: list[FinishReason | None] = [None] * (count * len(self._call.tokens))
        opened = set[int]()
        try:
            async with aclosing(relay.pieces(self._fleet, self._call)) as pieces:
                async for number, chunk in pieces:
                    index = number * count + chunk.sample
                    data = b""
                    if not opened:
                        await send({"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS})
                    if index not in opened:
                        opened.add(index)
                        data = form.opening(index)
                    reasons[index] = chunk.finish_reason or reasons[index]
                    if chunk.text or chunk.finish_reason is not None:
                        data += form.piece(index, chunk.text, chunk.finish_reason, None)
                    self._note(chunk)
                    if data:
                        await send({"type": "http.response.body", "body": data, "more_body": True})
            self._check_whole(reasons)
            last = form.usage(self._taken) + DONE if self._call.ask.with_usage else DONE
        except ApiError as error:
            if not opened:
                raise
            last = b"data: " + orjson.dumps(error.body) + b"\n\n" + DONE
        await send({"type": "http.response.body", "body": last})

    def _note(self, chunk: Chunk) -> None:
        if self._waits_for_first:
            self._waits_for_first = False
            self._telemetry.first_token.observe(time.monotonic() - self._started_s)
        if chunk.usage is not None:
            self._taken = self._taken.plus(chunk.usage)
            self._telemetry.taken = self._telemetry.taken.plus(chunk.usage)

    @staticmethod
    def _check_whole(reasons: list[FinishReason | None]) -> None:
        """Refuses to call an answer whole that a worker has broken off.

        Raises:
            ApiError: a choice has not ended.
        """
        if None in reasons:
            raise ApiError(502, "a worker ended its answer too early", kind="server_error", code="incomplete")


async def until_gone(receive: Receive, answer: Awaitable[None]) -> None:
    """Answers while the caller listens; cancels the answer when it has gone.

    Raises:
        CallerGoneError: it has.
    """
    answering = asyncio.ensure_future(answer)
    leaving = asyncio.ensure_future(_left(receive))
    try:
        await asyncio.wait((answering, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not answering.done():
            raise CallerGoneError
        await answering
    finally:
        for task in (answering, leaving):
            task.cancel()
        await asyncio.gather(answering, leaving, return_exceptions=True)


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
